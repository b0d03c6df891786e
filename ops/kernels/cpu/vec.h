// Sixteen fp32 lanes, whatever the machine: one AVX-512 register, two AVX2 registers or four NEON registers.
// Every operation below is one IEEE operation per lane (FMA where it says so), so the lanes hold the same bits
// on every instruction set. Nothing here adds lanes to each other except hsum(), whose tree is written out.
// The file must be compiled with -ffp-contract=off and without -ffast-math: each rounding is a decision.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SB_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SB_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define SB_NEON 1
#include <arm_neon.h>
#else
#error "needs AVX-512 (F, BW, DQ, VL), AVX2 with FMA and F16C, or AArch64 NEON"
#endif

#define SB_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define SB_UNROLL _Pragma("unroll")
#else
#define SB_UNROLL _Pragma("GCC unroll 16")
#endif

constexpr int LANES = 16;
enum Dtype { F32 = 0, BF16 = 1, F16 = 2 };

#if SB_AVX512
struct V16 { __m512 v; };
SB_INLINE V16 vzero() { return {_mm512_setzero_ps()}; }
SB_INLINE V16 vset1(float x) { return {_mm512_set1_ps(x)}; }
SB_INLINE V16 vload(const float* p) { return {_mm512_loadu_ps(p)}; }
SB_INLINE void vstore(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
SB_INLINE V16 vfma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SB_INLINE V16 vfnma(V16 a, V16 b, V16 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
SB_INLINE V16 vadd(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SB_INLINE V16 vsub(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SB_INLINE V16 vmul(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SB_INLINE V16 vdiv(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
SB_INLINE V16 vmax(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
SB_INLINE V16 vmin(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
SB_INLINE V16 vselect_lt(V16 a, V16 b, V16 yes, V16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
SB_INLINE V16 vbit_and(V16 a, uint32_t m) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32((int)m)))};
}
SB_INLINE V16 vbit_or(V16 a, V16 b) {
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
}
SB_INLINE V16 vbit_shl23_add(V16 a, uint32_t add) {
  return {_mm512_castsi512_ps(
      _mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23), _mm512_set1_epi32((int)add)))};
}
SB_INLINE V16 vbit_shl16(V16 a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 16))}; }
SB_INLINE V16 vload_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
SB_INLINE V16 vload_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
SB_INLINE void vstore_bf16(uint16_t* p, V16 a) {
  // Integer rounding to nearest even; the AVX512-BF16 instruction would flush denormals.
  __m512i b = _mm512_castps_si512(a.v);
  __m512i lsb = _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(b, _mm512_set1_epi32(0x7fff)), lsb), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(r, nan, _mm512_or_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(0x40)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
SB_INLINE void vstore_f16(uint16_t* p, V16 a) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif SB_AVX2
struct V16 { __m256 a, b; };
SB_INLINE V16 vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SB_INLINE V16 vset1(float x) { __m256 t = _mm256_set1_ps(x); return {t, t}; }
SB_INLINE V16 vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SB_INLINE void vstore(float* p, V16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
SB_INLINE V16 vfma(V16 x, V16 y, V16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
SB_INLINE V16 vfnma(V16 x, V16 y, V16 z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
SB_INLINE V16 vadd(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
SB_INLINE V16 vsub(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
SB_INLINE V16 vmul(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
SB_INLINE V16 vdiv(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
SB_INLINE V16 vmax(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
SB_INLINE V16 vmin(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
SB_INLINE V16 vselect_lt(V16 x, V16 y, V16 yes, V16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
SB_INLINE V16 vbit_and(V16 x, uint32_t m) {
  __m256 t = _mm256_castsi256_ps(_mm256_set1_epi32((int)m));
  return {_mm256_and_ps(x.a, t), _mm256_and_ps(x.b, t)};
}
SB_INLINE V16 vbit_or(V16 x, V16 y) { return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)}; }
SB_INLINE __m256 sb_shl23_add(__m256 x, uint32_t add) {
  return _mm256_castsi256_ps(
      _mm256_add_epi32(_mm256_slli_epi32(_mm256_castps_si256(x), 23), _mm256_set1_epi32((int)add)));
}
SB_INLINE V16 vbit_shl23_add(V16 x, uint32_t add) { return {sb_shl23_add(x.a, add), sb_shl23_add(x.b, add)}; }
SB_INLINE V16 vbit_shl16(V16 x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.a), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.b), 16))};
}
SB_INLINE V16 vload_bf16(const uint16_t* p) {
  __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
SB_INLINE V16 vload_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
SB_INLINE __m256i sb_round_bf16(__m256 x) {
  __m256i b = _mm256_castps_si256(x);
  __m256i lsb = _mm256_and_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7fff)), lsb), 16);
  __m256i q = _mm256_or_si256(_mm256_srli_epi32(b, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(r, q, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
SB_INLINE void vstore_bf16(uint16_t* p, V16 x) {
  __m256i t = _mm256_packus_epi32(sb_round_bf16(x.a), sb_round_bf16(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(t, 0xD8));
}
SB_INLINE void vstore_f16(uint16_t* p, V16 x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
struct V16 { float32x4_t q[4]; };
#define SB_EACH(expr) V16 o; SB_UNROLL for (int i = 0; i < 4; i++) o.q[i] = (expr); return o
SB_INLINE V16 vset1(float x) { SB_EACH(vdupq_n_f32(x)); }
SB_INLINE V16 vzero() { return vset1(0.f); }
SB_INLINE V16 vload(const float* p) { SB_EACH(vld1q_f32(p + 4 * i)); }
SB_INLINE void vstore(float* p, V16 a) { SB_UNROLL for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.q[i]); }
SB_INLINE V16 vfma(V16 a, V16 b, V16 c) { SB_EACH(vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
SB_INLINE V16 vfnma(V16 a, V16 b, V16 c) { SB_EACH(vfmsq_f32(c.q[i], a.q[i], b.q[i])); }
SB_INLINE V16 vadd(V16 a, V16 b) { SB_EACH(vaddq_f32(a.q[i], b.q[i])); }
SB_INLINE V16 vsub(V16 a, V16 b) { SB_EACH(vsubq_f32(a.q[i], b.q[i])); }
SB_INLINE V16 vmul(V16 a, V16 b) { SB_EACH(vmulq_f32(a.q[i], b.q[i])); }
SB_INLINE V16 vdiv(V16 a, V16 b) { SB_EACH(vdivq_f32(a.q[i], b.q[i])); }
// Same answer as x86 for a NaN: the second operand.
SB_INLINE V16 vmax(V16 a, V16 b) { SB_EACH(vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
SB_INLINE V16 vmin(V16 a, V16 b) { SB_EACH(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
SB_INLINE V16 vselect_lt(V16 a, V16 b, V16 yes, V16 no) {
  SB_EACH(vbslq_f32(vcltq_f32(a.q[i], b.q[i]), yes.q[i], no.q[i]));
}
SB_INLINE V16 vbit_and(V16 a, uint32_t m) {
  SB_EACH(vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.q[i]), vdupq_n_u32(m))));
}
SB_INLINE V16 vbit_or(V16 a, V16 b) {
  SB_EACH(vreinterpretq_f32_u32(vorrq_u32(vreinterpretq_u32_f32(a.q[i]), vreinterpretq_u32_f32(b.q[i]))));
}
SB_INLINE V16 vbit_shl23_add(V16 a, uint32_t add) {
  SB_EACH(vreinterpretq_f32_u32(vaddq_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.q[i]), 23), vdupq_n_u32(add))));
}
SB_INLINE V16 vbit_shl16(V16 a) {
  SB_EACH(vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a.q[i]), 16)));
}
SB_INLINE V16 vload_bf16(const uint16_t* p) { SB_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
SB_INLINE V16 vload_f16(const uint16_t* p) { SB_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
SB_INLINE void vstore_bf16(uint16_t* p, V16 a) {
  SB_UNROLL for (int i = 0; i < 4; i++) {
    uint32x4_t b = vreinterpretq_u32_f32(a.q[i]);
    uint32x4_t lsb = vandq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(1));
    uint32x4_t r = vshrq_n_u32(vaddq_u32(vaddq_u32(b, vdupq_n_u32(0x7fff)), lsb), 16);
    uint32x4_t quiet = vorrq_u32(vshrq_n_u32(b, 16), vdupq_n_u32(0x40));
    vst1_u16(p + 4 * i, vmovn_u32(vbslq_u32(vceqq_f32(a.q[i], a.q[i]), r, quiet)));
  }
}
SB_INLINE void vstore_f16(uint16_t* p, V16 a) {
  SB_UNROLL for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.q[i])));
}
#undef SB_EACH
#endif

// Element types: how sixteen stored numbers become sixteen fp32 lanes (always exactly) and back (nearest even).
struct TF32 {
  static constexpr bool PAIRS = false;  // packed weights hold k in pairs
  typedef float S;
  SB_INLINE V16 ld(const S* p) { return vload(p); }
  SB_INLINE void st(S* p, V16 a) { vstore(p, a); }
};
struct TBF16 {
  static constexpr bool PAIRS = true;  // packed weights hold k in pairs
  typedef uint16_t S;
  SB_INLINE V16 ld(const S* p) { return vload_bf16(p); }
  SB_INLINE void st(S* p, V16 a) { vstore_bf16(p, a); }
};
struct TF16 {
  static constexpr bool PAIRS = false;  // packed weights hold k in pairs
  typedef uint16_t S;
  SB_INLINE V16 ld(const S* p) { return vload_f16(p); }
  SB_INLINE void st(S* p, V16 a) { vstore_f16(p, a); }
};

// The first n of sixteen elements; the other lanes read as +0 and are not written.
template <class T> SB_INLINE V16 load_n(const typename T::S* p, int n) {
  if (n >= LANES) return T::ld(p);
  typename T::S t[LANES] = {};
  memcpy(t, p, sizeof(typename T::S) * (size_t)n);
  return T::ld(t);
}
template <class T> SB_INLINE void store_n(typename T::S* p, V16 a, int n) {
  if (n >= LANES) { T::st(p, a); return; }
  typename T::S t[LANES];
  T::st(t, a);
  memcpy(p, t, sizeof(typename T::S) * (size_t)n);
}

// lanes i and i+8, then i and i+4, then i and i+2, then 0 and 1: the one tree of the whole library.
SB_INLINE float hsum(V16 a) {
  float t[LANES];
  vstore(t, a);
  for (int s = 8; s; s >>= 1)
    for (int i = 0; i < s; i++) t[i] = t[i] + t[i + s];
  return t[0];
}
// The largest lane: any order gives the same number.
SB_INLINE float hmax(V16 a) {
#if SB_AVX512
  return _mm512_reduce_max_ps(a.v);
#elif SB_AVX2
  const __m256 m = _mm256_max_ps(a.a, a.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
#else
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q[0], a.q[1]), vmaxq_f32(a.q[2], a.q[3])));
#endif
}

// Calls f with the element type that a dtype code names.
#define SB_DISPATCH(dt, T, ...)                          \
  do {                                                   \
    if ((dt) == F32) { typedef TF32 T; __VA_ARGS__; }    \
    else if ((dt) == BF16) { typedef TBF16 T; __VA_ARGS__; } \
    else { typedef TF16 T; __VA_ARGS__; }                \
  } while (0)
SB_INLINE size_t dtype_bytes(int dt) { return dt == F32 ? 4 : 2; }
