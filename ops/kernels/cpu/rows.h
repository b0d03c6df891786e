// Operations on whole rows. Every sum over a row: lane i of sixteen takes elements i, i+16, i+32, … in ascending
// order (squares by FMA), then the tree of hsum(). A row is always the work of one thread.
#pragma once
#include "pool.h"
#include "vmath.h"

// Rows addressed by two strides: row i stands at (i / inner) * outer_stride + (i % inner) * inner_stride.
struct Rows {
  void* p; int dt; int64_t inner, outer_stride, inner_stride;
};
template <class T> SB_INLINE typename T::S* row_at(const Rows& x, int64_t i) {
  return (typename T::S*)x.p + (i / x.inner) * x.outer_stride + (i % x.inner) * x.inner_stride;
}
SB_INLINE int left(int64_t n, int64_t i) { return n - i < LANES ? (int)(n - i) : LANES; }

template <class F> static void for_rows(int64_t m, int64_t h, const F& f) {
  parallel(threads_for(m * h, 1 << 14), [&](int t, int team) {
    Range r = share(m, 1, t, team);
    for (int64_t i = r.begin; i < r.end; i++) f(i);
  });
}

// y = x / sqrt(mean(x²) + eps) * (weight + weight_offset), all in fp32, rounded once. With a residual: first
// x + residual in fp32, rounded to the residual's type, stored as the new residual, and normed as rounded.
template <class T, class TW>
static void rms_row(const typename T::S* x, const typename T::S* res, typename T::S* new_res, const typename TW::S* w,
                    float offset, float eps, int64_t h, typename T::S* y) {
  V16 ss = vzero();
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    V16 v = load_n<T>(x + i, n);
    if (res) {
      store_n<T>(new_res + i, vadd(v, load_n<T>(res + i, n)), n);
      v = load_n<T>(new_res + i, n);
    }
    ss = vfma(v, v, ss);
  }
  const typename T::S* s = res ? new_res : x;
  const V16 scale = vset1(1.f / sqrtf(hsum(ss) / (float)h + eps));
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    V16 v = vmul(load_n<T>(s + i, n), scale);
    if (w) v = vmul(v, vadd(load_n<TW>(w + i, n), vset1(offset)));
    store_n<T>(y + i, v, n);
  }
}

// y = (x - mean) / sqrt(mean((x - mean)²) + eps) * weight + bias, in fp32, rounded once.
template <class T, class TW>
static void layer_norm_row(const typename T::S* x, const typename TW::S* w, const typename TW::S* b, float eps,
                           int64_t h, typename T::S* y) {
  V16 s = vzero(), ss = vzero();
  for (int64_t i = 0; i < h; i += LANES) s = vadd(s, load_n<T>(x + i, left(h, i)));
  const V16 mean = vset1(hsum(s) / (float)h);
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    float t[LANES];
    vstore(t, vsub(load_n<T>(x + i, n), mean));
    const V16 d = load_n<TF32>(t, n);
    ss = vfma(d, d, ss);
  }
  const V16 scale = vset1(1.f / sqrtf(hsum(ss) / (float)h + eps));
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    V16 v = vmul(vsub(load_n<T>(x + i, n), mean), scale);
    if (w) v = vmul(v, load_n<TW>(w + i, n));
    if (b) v = vadd(v, load_n<TW>(b + i, n));
    store_n<T>(y + i, v, n);
  }
}

// max, then the sum of exp(x - max), then exp(x - max) / sum, or (x - max) - log(sum).
template <class T> static void softmax_row(const typename T::S* x, int64_t h, float* y, bool want_log) {
  V16 m = vset1(-INFINITY), s = vzero();
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    V16 v = load_n<T>(x + i, n);
    if (n < LANES) {
      float t[LANES];
      vstore(t, v);
      for (int j = n; j < LANES; j++) t[j] = -INFINITY;
      v = vload(t);
    }
    m = vmax(m, v);
  }
  const float top = hmax(m);
  const V16 mx = vset1(top == -INFINITY ? 0.f : top);
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    V16 e = vexp(vsub(load_n<T>(x + i, n), mx));
    if (n < LANES) {
      float t[LANES];
      vstore(t, e);
      e = load_n<TF32>(t, n);
    }
    s = vadd(s, e);
  }
  const float sum = hsum(s);
  const V16 by = vset1(want_log ? slog(sum) : sum);
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    const V16 d = vsub(load_n<T>(x + i, n), mx);
    store_n<TF32>(y + i, want_log ? vsub(d, by) : vdiv(vexp(d), by), n);
  }
}

template <class T> static float sum_row(const typename T::S* x, int64_t h) {
  V16 s = vzero();
  for (int64_t i = 0; i < h; i += LANES) s = vadd(s, load_n<T>(x + i, left(h, i)));
  return hsum(s);
}

// y = act(x) or, for gated rows [gate | up], act(gate) * up; in fp32, rounded once.
template <class T> static void act_row(const typename T::S* x, int64_t h, int kind, bool gated, typename T::S* y) {
  for (int64_t i = 0; i < h; i += LANES) {
    const int n = left(h, i);
    V16 v = activate(load_n<T>(x + i, n), kind);
    if (gated) v = vmul(v, load_n<T>(x + h + i, n));
    store_n<T>(y + i, v, n);
  }
}

// One head, in place. (a, b) -> (a cos - b sin, b cos + a sin): second product rounded, first one fused.
// neox: a and b are the two halves of the rotated part; else even and odd elements.
template <class T>
static void rotate_head(typename T::S* x, const float* cos, const float* sin, int64_t half, bool neox) {
  if (neox) {
    for (int64_t i = 0; i < half; i += LANES) {
      const int n = left(half, i);
      const V16 a = load_n<T>(x + i, n), b = load_n<T>(x + half + i, n);
      const V16 c = load_n<TF32>(cos + i, n), s = load_n<TF32>(sin + i, n);
      store_n<T>(x + i, vfnma(b, s, vmul(a, c)), n);
      store_n<T>(x + half + i, vfma(a, s, vmul(b, c)), n);
    }
    return;
  }
  for (int64_t i = 0; i < half; i += LANES) {
    const int n = left(half, i);
    typename T::S a[LANES] = {}, b[LANES] = {};
    for (int j = 0; j < n; j++) { a[j] = x[2 * (i + j)]; b[j] = x[2 * (i + j) + 1]; }
    const V16 c = load_n<TF32>(cos + i, n), s = load_n<TF32>(sin + i, n);
    const V16 va = T::ld(a), vb = T::ld(b);
    T::st(a, vfnma(vb, s, vmul(va, c)));
    T::st(b, vfma(va, s, vmul(vb, c)));
    for (int j = 0; j < n; j++) { x[2 * (i + j)] = a[j]; x[2 * (i + j) + 1] = b[j]; }
  }
}
