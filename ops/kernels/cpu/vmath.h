// exp, log, tanh, erf for sixteen lanes: our own polynomials, so that no libm and no instruction set has a say.
// Coefficients: the minimax sets of Cephes (expf, logf, tanhf) and formula 7.1.26 of Abramowitz and Stegun (erf).
#pragma once
#include <cmath>
#include "vec.h"

// Relative error about 1e-7; exactly 1 at 0; 0 below -87; argument held at 88 above. NaN stays NaN.
SB_INLINE V16 vexp(V16 x0) {
  const V16 x = vmin(vset1(88.f), vmax(vset1(-87.f), x0));
  const V16 magic = vset1(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const V16 t = vfma(x, vset1(1.44269504088896341f), magic);
  const V16 n = vsub(t, magic);
  V16 r = vfnma(n, vset1(0.693359375f), x);
  r = vfnma(n, vset1(-2.12194440e-4f), r);
  V16 y = vset1(1.9875691500e-4f);
  y = vfma(y, r, vset1(1.3981999507e-3f));
  y = vfma(y, r, vset1(8.3334519073e-3f));
  y = vfma(y, r, vset1(4.1665795894e-2f));
  y = vfma(y, r, vset1(1.6666665459e-1f));
  y = vfma(y, r, vset1(5.0000001201e-1f));
  y = vfma(y, vmul(r, r), r);
  y = vadd(y, vset1(1.f));
  y = vmul(y, vbit_shl23_add(t, 0x3f800000u));
  return vselect_lt(x0, vset1(-87.f), vzero(), y);
}

// 2^x for -inf <= x <= 0, never below 2^-126; relative error about 1e-7; exactly 1 at 0. NaN stays NaN.
SB_INLINE V16 vexp2_down(V16 x0) {
  const V16 magic = vset1(12582912.f);
  const V16 x = vmax(vset1(-126.f), x0);
  const V16 t = vadd(x, magic);
  const V16 r = vsub(x, vsub(t, magic));
  V16 y = vset1(1.535336188319500e-4f);
  y = vfma(y, r, vset1(1.339887440266574e-3f));
  y = vfma(y, r, vset1(9.618437357674640e-3f));
  y = vfma(y, r, vset1(5.550332471162809e-2f));
  y = vfma(y, r, vset1(2.402264791363012e-1f));
  y = vfma(y, r, vset1(6.931472028550421e-1f));
  y = vfma(y, r, vset1(1.f));
  return vmul(y, vbit_shl23_add(t, 0x3f800000u));
}
constexpr float LOG2E = 1.44269504088896341f;

// Natural logarithm of one finite number > 0 (the sums of softmax are at least 1).
static inline float slog(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  if (!(v > 0.f) || bits >= 0x7f800000u) return v == 0.f ? -INFINITY : v;  // inf and NaN pass through
  int e = (int)(bits >> 23) - 126;
  bits = (bits & 0x007fffffu) | 0x3f000000u;
  float x;
  memcpy(&x, &bits, 4);
  if (x < 0.707106781186547524f) { e -= 1; x = x + x; }
  x = x - 1.f;
  const float z = x * x;
  float y = 7.0376836292e-2f;
  y = fmaf(y, x, -1.1514610310e-1f);
  y = fmaf(y, x, 1.1676998740e-1f);
  y = fmaf(y, x, -1.2420140846e-1f);
  y = fmaf(y, x, 1.4249322787e-1f);
  y = fmaf(y, x, -1.6668057665e-1f);
  y = fmaf(y, x, 2.0000714765e-1f);
  y = fmaf(y, x, -2.4999993993e-1f);
  y = fmaf(y, x, 3.3333331174e-1f);
  y = y * x * z;
  y = fmaf((float)e, -2.12194440e-4f, y);
  y = fmaf(-0.5f, z, y);
  return fmaf((float)e, 0.693359375f, x + y);
}

SB_INLINE V16 vtanh(V16 x) {
  const V16 a = vbit_and(x, 0x7fffffffu);
  const V16 z = vmul(x, x);
  V16 p = vset1(-5.70498872745e-3f);
  p = vfma(p, z, vset1(2.06390887954e-2f));
  p = vfma(p, z, vset1(-5.37397155531e-2f));
  p = vfma(p, z, vset1(1.33314422036e-1f));
  p = vfma(p, z, vset1(-3.33332819422e-1f));
  const V16 small = vfma(vmul(p, z), x, x);
  V16 big = vsub(vset1(1.f), vdiv(vset1(2.f), vadd(vexp(vadd(a, a)), vset1(1.f))));
  big = vbit_or(big, vbit_and(x, 0x80000000u));
  return vselect_lt(a, vset1(0.625f), small, big);
}

SB_INLINE V16 verf(V16 x) {  // absolute error 1.5e-7
  const V16 a = vbit_and(x, 0x7fffffffu);
  const V16 t = vdiv(vset1(1.f), vfma(a, vset1(0.3275911f), vset1(1.f)));
  V16 y = vset1(1.061405429f);
  y = vfma(y, t, vset1(-1.453152027f));
  y = vfma(y, t, vset1(1.421413741f));
  y = vfma(y, t, vset1(-0.284496736f));
  y = vfma(y, t, vset1(0.254829592f));
  y = vmul(y, t);
  y = vfnma(y, vexp(vsub(vzero(), vmul(a, a))), vset1(1.f));
  return vbit_or(y, vbit_and(x, 0x80000000u));
}

SB_INLINE V16 vsigmoid(V16 x) { return vdiv(vset1(1.f), vadd(vset1(1.f), vexp(vsub(vzero(), x)))); }

enum Act { SILU = 0, GELU = 1, GELU_TANH = 2, RELU = 3, QUICK_GELU = 4, SIGMOID = 5, TANH = 6, RELU2 = 7, IDENTITY = 8 };

SB_INLINE V16 activate(V16 x, int kind) {
  switch (kind) {
    case SILU: return vdiv(x, vadd(vset1(1.f), vexp(vsub(vzero(), x))));
    case GELU: return vmul(vmul(x, vset1(0.5f)), vadd(vset1(1.f), verf(vmul(x, vset1(0.70710678118654752f)))));
    case GELU_TANH: {
      const V16 inner = vmul(vset1(0.79788456080286536f), vfma(vmul(vmul(x, x), x), vset1(0.044715f), x));
      return vmul(vmul(x, vset1(0.5f)), vadd(vset1(1.f), vtanh(inner)));
    }
    case RELU: return vmax(vzero(), x);
    case QUICK_GELU: return vmul(x, vsigmoid(vmul(x, vset1(1.702f))));
    case SIGMOID: return vsigmoid(x);
    case TANH: return vtanh(x);
    case RELU2: { const V16 r = vmax(vzero(), x); return vmul(r, r); }
    default: return x;
  }
}
