// y[m,n] = sum over k of x[m,k] * w[n,k] (+ bias[n]).
// Order: for each output element one fp32 accumulator starts at +0 and takes k = 0, 1, … K-1 with one FMA each;
// then one addition of the bias in fp32, then one rounding to the output type. The lanes of a vector are sixteen
// neighbouring outputs, so no sum is ever cut or reordered: not by the number of rows, the row's place, the tile,
// the thread count or the instruction set. Between blocks of k the accumulators rest in memory as fp32, unrounded.
//
// Packed weights: panels of sixteen rows of w, each stored [k][16]; the last panel of a width that sixteen does not
// divide is stored [k][n % 16]. A panel takes exactly the bytes of its rows, so packing happens in place. bf16 panels
// hold k in pairs, [k / 2][16][2] with the odd k first, then [16] for a last k without partner: the upper half of
// each 32 bits is then the even k as fp32, the lower half one shift away.
//
// bf16 weights and VDPBF16PS: that instruction is two FMAs, upper half first, each rounded to nearest, denormals
// taken and given as zero. So with bf16 weights every path runs with denormals flushed, and the instruction, where
// the CPU has it and dot_is_two_fmas() saw it agree, gives the bits of the FMAs at twice the speed. (AArch64 decides
// "denormal" before rounding, x86 after: a sum within 2^-25 below 2^-126 is the one case where they could differ.)
#pragma once
#include "pool.h"

// A tile is `rows` x `panels` accumulators. It changes speed only: each accumulator's own order is always the same.
#if SB_AVX512
constexpr int MAX_ROWS = 12;
constexpr int panels_for(int rows) { return rows <= 4 ? 4 : 2; }  // 24 accumulators at most, of 32 registers
#elif SB_AVX2
constexpr int MAX_ROWS = 6;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }  // 12 pairs of 16 registers at most
#else
constexpr int MAX_ROWS = 6;
constexpr int panels_for(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }  // 24 of 32 registers at most
#endif
constexpr int MAX_PANELS = 4;
SB_INLINE int panels_now(int64_t remaining, int most) {
  return remaining >= 4 && most >= 4 ? 4 : remaining >= 2 && most >= 2 ? 2 : 1;
}

// R rows of x, lda apart, column after column. One pointer serves three rows: twelve row pointers or offsets don't fit in
// the address registers, and reloading them took a twentieth of the speed. The barrier keeps the compiler from joining them.
template <int R> struct Columns {
  const float* p[(R + 2) / 3];
  int64_t lda;
  __attribute__((always_inline)) Columns(const float* a, int64_t stride) : lda(stride) {
    SB_UNROLL for (int g = 0; g < (R + 2) / 3; g++) {
      p[g] = a + 3 * g * lda;
      __asm__("" : "+r"(p[g]));
    }
  }
  __attribute__((always_inline)) float at(int r, int k) const { return p[r / 3][r % 3 * lda + k]; }
  __attribute__((always_inline)) void step(int n) { SB_UNROLL for (int g = 0; g < (R + 2) / 3; g++) p[g] += n; }
};

// c[r][p*16..] (+)= sum over k of a[r][k] * b[p][k*ldb..]; `first` starts at +0, else at what c holds.
template <int R, int P, class T>
static inline void micro(const float* a, int64_t lda, const typename T::S* const* b, int64_t ldb, int64_t k_len,
                         float* c, int64_t ldc, bool first) {
  V16 acc[R][P];
  const typename T::S* bp[P];
  SB_UNROLL for (int p = 0; p < P; p++) bp[p] = b[p];
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = first ? vzero() : vload(c + r * ldc + p * LANES);
  Columns<R> x(a, lda);
  for (int64_t k = 0; k < k_len; k++) {
    V16 w[P];
    SB_UNROLL for (int p = 0; p < P; p++) {
      w[p] = T::ld(bp[p]);
      if (R <= 4) __builtin_prefetch((const char*)bp[p] + 512);
      bp[p] += ldb;
    }
    SB_UNROLL for (int r = 0; r < R; r++) {
      const V16 xr = vset1(x.at(r, 0));
      SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = vfma(xr, w[p], acc[r][p]);
    }
    x.step(1);
  }
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) vstore(c + r * ldc + p * LANES, acc[r][p]);
}

// The same over bf16 pairs: `pairs` of them; a holds fp32.
template <int R, int P>
static inline void micro_pairs(const float* a, int64_t lda, const uint16_t* const* b, int64_t pairs, float* c, int64_t ldc,
                               bool first) {
  V16 acc[R][P];
  const uint16_t* bp[P];
  SB_UNROLL for (int p = 0; p < P; p++) bp[p] = b[p];
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = first ? vzero() : vload(c + r * ldc + p * LANES);
  Columns<R> x(a, lda);
  for (int64_t k = 0; k < pairs; k++) {
    V16 even[P], odd[P];
    SB_UNROLL for (int p = 0; p < P; p++) {
      const V16 both = vload((const float*)(const void*)bp[p]);
      even[p] = vbit_and(both, 0xffff0000u);
      odd[p] = vbit_shl16(both);
      if (R <= 4) __builtin_prefetch((const char*)bp[p] + 512);
      bp[p] += 2 * LANES;
    }
    SB_UNROLL for (int r = 0; r < R; r++) {
      const V16 x0 = vset1(x.at(r, 0)), x1 = vset1(x.at(r, 1));
      SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = vfma(x1, odd[p], vfma(x0, even[p], acc[r][p]));
    }
    x.step(2);
  }
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) vstore(c + r * ldc + p * LANES, acc[r][p]);
}
using PairsFn = void (*)(const float*, int64_t, const uint16_t* const*, int64_t, float*, int64_t, bool);

#if SB_AVX512 && (defined(__clang__) || __GNUC__ >= 10)
#define SB_DOT 1
#define SB_DOT_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,f16c,avx2")))
// And with the dot product instruction; a holds pairs of bf16, even k in the upper half, lda counts pairs.
template <int R, int P>
SB_DOT_TARGET static void micro_dot(const float* a, int64_t lda, const uint16_t* const* b, int64_t pairs, float* c, int64_t ldc,
                                    bool first) {
  __m512 acc[R][P];
  const uint16_t* bp[P];
  SB_UNROLL for (int p = 0; p < P; p++) bp[p] = b[p];
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++)
      acc[r][p] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * ldc + p * LANES);
  Columns<R> x(a, lda);
  for (int64_t k = 0; k < pairs; k++) {
    __m512i w[P];
    SB_UNROLL for (int p = 0; p < P; p++) {
      w[p] = _mm512_loadu_si512(bp[p]);
      if (R <= 4) __builtin_prefetch((const char*)bp[p] + 512);
      bp[p] += 2 * LANES;
    }
    SB_UNROLL for (int r = 0; r < R; r++) {
      const __m512i xr = _mm512_castps_si512(_mm512_set1_ps(x.at(r, 0)));
      SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = _mm512_dpbf16_ps(acc[r][p], (__m512bh)xr, (__m512bh)w[p]);
    }
    x.step(1);
  }
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) _mm512_storeu_ps(c + r * ldc + p * LANES, acc[r][p]);
}
#else
#define SB_DOT 0
#endif
static bool use_dot = false;

template <class T>
using MicroFn = void (*)(const float*, int64_t, const typename T::S* const*, int64_t, int64_t, float*, int64_t, bool);

// Which function makes a tile of `rows` x `panels`: Make<R, P>::fn for every shape that a CPU's registers hold.
template <template <int, int> class Make, int R> static auto tile_wide(int panels) -> decltype(Make<1, 1>::fn()) {
  constexpr int MOST = panels_for(R);
  if (panels == 4 && MOST >= 4) return Make<R, MOST >= 4 ? 4 : 1>::fn();
  if (panels == 2 && MOST >= 2) return Make<R, MOST >= 2 ? 2 : 1>::fn();
  return Make<R, 1>::fn();
}
template <template <int, int> class Make> static auto tile_of(int rows, int panels) -> decltype(Make<1, 1>::fn()) {
  switch (rows) {
    case 1: return tile_wide<Make, 1>(panels);
    case 2: return tile_wide<Make, 2>(panels);
    case 3: return tile_wide<Make, 3>(panels);
    case 4: return tile_wide<Make, 4>(panels);
    case 5: return tile_wide<Make, 5>(panels);
    case 6: return tile_wide<Make, 6>(panels);
#if SB_AVX512
    case 7: return tile_wide<Make, 7>(panels);
    case 8: return tile_wide<Make, 8>(panels);
    case 9: return tile_wide<Make, 9>(panels);
    case 10: return tile_wide<Make, 10>(panels);
    case 11: return tile_wide<Make, 11>(panels);
    case 12: return tile_wide<Make, 12>(panels);
#endif
  }
  abort();
}
template <class T> struct Plain {
  template <int R, int P> struct Tile { static MicroFn<T> fn() { return micro<R, P, T>; } };
};
template <int R, int P> struct PairTile { static PairsFn fn() { return micro_pairs<R, P>; } };
template <class T> static MicroFn<T> micro_of(int rows, int panels) { return tile_of<Plain<T>::template Tile>(rows, panels); }
#if SB_DOT
template <int R, int P> struct DotTile { static PairsFn fn() { return micro_dot<R, P>; } };
#endif
static PairsFn pairs_of(int rows, int panels, bool dot) {
#if SB_DOT
  if (dot) return tile_of<DotTile>(rows, panels);
#endif
  (void)dot;
  return tile_of<PairTile>(rows, panels);
}

struct Linear {
  const void* x; int xdt; int64_t ldx;      // [m, k], row stride in elements
  const void* w; int wdt; int64_t n, k;     // packed
  const void* bias; int bdt;                // [n] or null
  void* out; int odt; int64_t ldo;          // [m, n]
};

template <class T> static void rows_to_f32(const void* x, int64_t ldx, int64_t m, int64_t k, float* a, int64_t lda) {
  for (int64_t r = 0; r < m; r++) {
    const typename T::S* s = (const typename T::S*)x + r * ldx;
    float* d = a + r * lda;
    for (int64_t i = 0; i < k; i += LANES) vstore(d + i, load_n<T>(s + i, (int)(k - i < LANES ? k - i : LANES)));
  }
}

// bf16 rows as pairs with the even k in the upper half; lda counts pairs. A last k without partner is left out.
static void rows_to_pairs(const void* x, int64_t ldx, int64_t m, int64_t k, float* a, int64_t lda) {
  for (int64_t r = 0; r < m; r++) {
    const uint16_t* s = (const uint16_t*)x + r * ldx;
    uint32_t* d = (uint32_t*)(void*)(a + r * lda);
    for (int64_t i = 0; i < k / 2; i++) d[i] = (uint32_t)s[2 * i] << 16 | s[2 * i + 1];
  }
}

// acc (+ bias) -> one rounding -> out, for `rows` rows and `cols` columns from column `n0`.
template <class TO, class TB>
static void finish(const Linear& l, const float* c, int64_t ldc, int64_t row, int rows, int64_t n0, int cols) {
  for (int j = 0; j < cols; j += LANES) {
    int n = cols - j < LANES ? cols - j : LANES;
    V16 b = l.bias ? load_n<TB>((const typename TB::S*)l.bias + n0 + j, n) : vzero();
    for (int r = 0; r < rows; r++) {
      V16 v = vload(c + r * ldc + j);
      if (l.bias) v = vadd(v, b);
      store_n<TO>((typename TO::S*)l.out + (row + r) * l.ldo + n0 + j, v, n);
    }
  }
}

// The rows of x as the tiles read them: fp32, or pairs for the dot product. Copied where the input is narrower, and where
// many rows a power of two apart would share cache sets.
struct Input { const float* a; int64_t lda; };
static Input input_of(const Linear& l, int64_t m0, int64_t m, bool dot) {
  if (l.xdt == F32 && (m <= 2 || (l.ldx & 255))) return {(const float*)l.x + m0 * l.ldx, l.ldx};
  const int64_t lda = (((dot ? l.k / 2 : l.k) + 15) & ~(int64_t)15) + LANES;
  float* t = scratch<0>((size_t)(m * lda));
  SB_DISPATCH(l.xdt, TX, {
    const typename TX::S* x = (const typename TX::S*)l.x + m0 * l.ldx;
    if (dot) rows_to_pairs(x, l.ldx, m, l.k, t, lda);
    else rows_to_f32<TX>(x, l.ldx, m, l.k, t, lda);
  });
  return {t, lda};
}

// A narrow last panel with zeros beside it, so that it can be read as a wide one.
template <class S> static const S* unfold(const S* base, int cols, int64_t k, bool pairs) {
  S* wide = (S*)scratch<2>((size_t)(k * LANES));
  memset(wide, 0, sizeof(S) * (size_t)(k * LANES));
  const int64_t even = pairs ? k / 2 : 0;
  for (int64_t i = 0; i < even; i++) memcpy(wide + i * 2 * LANES, base + i * 2 * cols, sizeof(S) * 2 * (size_t)cols);
  for (int64_t i = 2 * even; i < k; i++) memcpy(wide + i * LANES, base + i * cols, sizeof(S) * (size_t)cols);
  return wide;
}

// One tile over k0..k0+kl. For bf16: the pairs, and with the end of k the one without partner.
template <class T>
static void tile(const Linear& l, Input in, int64_t row, int rows, const typename T::S* const* b, int panels, int64_t k0,
                 int64_t kl, float* c, int64_t ldc, bool dot, int64_t m0) {
  if constexpr (!T::PAIRS) {
    micro_of<T>(rows, panels)(in.a + row * in.lda + k0, in.lda, b, LANES, kl, c, ldc, k0 == 0);
  } else {
    pairs_of(rows, panels, dot)(in.a + row * in.lda + (dot ? k0 / 2 : k0), in.lda, b, kl / 2, c, ldc, k0 == 0);
    if (kl % 2 == 0) return;
    const typename T::S* last[MAX_PANELS];
    for (int p = 0; p < panels; p++) last[p] = b[p] + (kl - 1) * LANES;
    float one[MAX_ROWS];
    for (int r = 0; r < rows; r++)
      SB_DISPATCH(l.xdt, TX, {
        float lanes[LANES];
        vstore(lanes, load_n<TX>((const typename TX::S*)l.x + (m0 + row + r) * l.ldx + l.k - 1, 1));
        one[r] = lanes[0];
      });
    micro_of<T>(rows, panels)(one, 1, last, LANES, 1, c, ldc, false);
  }
}

// Rows [m0, m1), read at `in`, and panels [p0, p1) of the product, by one thread.
template <class T>
static void linear_part(const Linear& l, Input in, bool dot, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
  typedef typename T::S S;
  const int64_t m = m1 - m0, k = l.k;
  const int64_t blocks = (m + MAX_ROWS - 1) / MAX_ROWS;
  const int64_t k_block = blocks == 1 ? k : (sizeof(S) == 4 ? 768 : 1024);  // even
  // One or two rows of a large weight wait for memory: one panel after the other is one stream to prefetch.
  const bool streaming = m <= 2 && l.n * k * (int64_t)sizeof(S) > 1 << 19;
  const int most = streaming ? 1 : panels_for((int)((m + blocks - 1) / blocks));
  const int64_t ldc = MAX_PANELS * LANES, c_step = k <= k_block ? 0 : ldc;  // a k of one block needs no accumulators kept
  float* c0 = scratch<1>((size_t)((m + MAX_ROWS) * ldc));
  const int64_t full = l.n / LANES;  // the panel after these, if any, is the narrow one
  for (int64_t p = p0; p < p1;) {
    int panels = (int)(full - p < p1 - p ? full - p : p1 - p);
    if (panels > 0) panels = panels_now(panels, most);
    const S* base = (const S*)l.w + p * LANES * k;
    int cols = panels * LANES;
    if (!panels) {
      cols = (int)(l.n - full * LANES);
      base = unfold(base, cols, k, T::PAIRS);
      panels = 1;
    }
    for (int64_t k0 = 0; k0 < k || k0 == 0; k0 += k_block) {
      const int64_t kl = k - k0 < k_block ? k - k0 : k_block;
      const S* b[MAX_PANELS];
      for (int i = 0; i < panels; i++) b[i] = base + (i * k + k0) * LANES;
      for (int64_t q = 0, r = 0; q < blocks; q++) {  // rows in blocks of nearly equal height
        int rows = (int)(m * (q + 1) / blocks - r);
        float* c = c0 + r * c_step;
        tile<T>(l, in, r, rows, b, panels, k0, kl, c, ldc, dot, m0);
        if (k0 + k_block >= k)
          SB_DISPATCH(l.odt, TO, SB_DISPATCH(l.bdt, TB, finish<TO, TB>(l, c, ldc, m0 + r, rows, p * LANES, cols)));
        r += rows;
      }
    }
    p += panels;
  }
}

// The whole product: pieces of rows x panels that threads take as they come free, so that a thread the system has
// put aside holds up one piece, not half of the work. As many pieces for each thread, in whole tiles, all of one size but
// for a tile, the last of them not the larger; those of the same rows follow each other: a thread copies its rows once.
static void linear_run(const Linear& l, int64_t m) {
  if (m <= 0) return;
  const int64_t panels = (l.n + LANES - 1) / LANES, blocks = (m + MAX_ROWS - 1) / MAX_ROWS;
  const int want = threads_for(m * l.n * l.k, 1 << 16);
  const int wide = m <= 2 ? 1 : panels_for((int)((m + blocks - 1) / blocks));  // as linear_part takes them
  const int64_t row_parts = (blocks + 11) / 12;  // of at most twelve tiles: the second cache holds them
  const int64_t panel_parts = want == 1 ? 1 : (4 + row_parts - 1) / row_parts * want;
  std::atomic<int64_t> next{0};
  parallel(want, [&](int, int) {
    SB_DISPATCH(l.wdt, T, {
      FlushedFloats flushed(T::PAIRS);
      const bool dot = T::PAIRS && use_dot && l.xdt == BF16;
      Input in = {nullptr, 0};
      for (int64_t i, at = -1; (i = next.fetch_add(1, std::memory_order_relaxed)) < row_parts * panel_parts;) {
        const Range r = share(m, MAX_ROWS, (int)(i / panel_parts), (int)row_parts);
        const Range p = share(panels, wide, (int)(panel_parts - 1 - i % panel_parts), (int)panel_parts);
        if (p.begin >= p.end) continue;
        if (at != r.begin) in = input_of(l, at = r.begin, r.end - r.begin, dot);
        linear_part<T>(l, in, dot, r.begin, r.end, p.begin, p.end);
      }
    });
  });
}

// True if this CPU's dot product gives, bit for bit, what two FMAs with flushed denormals give; looked at once, at load.
static bool dot_is_two_fmas() {
#if SB_DOT
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  FlushedFloats flushed(true);
  uint32_t seed = 1;
  auto draw = [&] { return seed = seed * 1664525u + 1013904223u, seed >> 8; };
  for (int round = 0; round < 2000; round++) {
    // near one another; anything; near or below the smallest normal numbers
    const uint32_t kind = (uint32_t)round % 3, low = kind == 0 ? 120 : kind == 1 ? 1 : 0, width = kind == 0 ? 14 : kind == 1 ? 253 : 70;
    auto number = [&](uint32_t e0, uint32_t span) { return (draw() & 1) << 31 | (e0 + draw() % span) << 23 | (draw() & 0x7fffff); };
    uint32_t bits[LANES];
    uint16_t w[2 * LANES + 512] = {};  // the prefetch looks ahead
    float a[2], want[LANES], got[LANES], x[2];
    for (int i = 0; i < 2 * LANES; i++) w[i] = (uint16_t)(number(low, width) >> 16);
    for (uint32_t& v : bits) v = number(low, width);
    const uint32_t x0 = number(low, width) & 0xffff0000u, x1 = number(low, width) & 0xffff0000u, pair = x0 | x1 >> 16;
    memcpy(x, &x0, 4);
    memcpy(x + 1, &x1, 4);
    memcpy(a, &pair, 4);
    memcpy(want, bits, sizeof want);
    memcpy(got, bits, sizeof got);
    const uint16_t* b[1] = {w};
    micro_pairs<1, 1>(x, 2, b, 1, want, LANES, false);
    micro_dot<1, 1>(a, 1, b, 1, got, LANES, false);
    for (int i = 0; i < LANES; i++)
      if (memcmp(want + i, got + i, 4) != 0 && !(want[i] != want[i] && got[i] != got[i])) return false;
  }
  return true;
#else
  return false;
#endif
}
