// y[m,n] = sum over k of x[m,k] * w[n,k] (+ bias[n]).
// Order: for each output element one fp32 accumulator starts at +0 and takes k = 0, 1, … K-1 with one FMA each;
// then one addition of the bias in fp32, then one rounding to the output type. The lanes of a vector are sixteen
// neighbouring outputs, so no sum is ever cut or reordered: not by the number of rows, the row's place, the tile,
// the thread count or the instruction set. Between blocks of k the accumulators rest in memory as fp32, unrounded.
//
// Packed weights: panels of sixteen rows of w, each stored [k][16]; the last panel of a width that sixteen does not
// divide is stored [k][n % 16]. A panel takes exactly the bytes of its rows, so packing happens in place.
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

// c[r][p*16..] (+)= sum over k of a[r][k] * b[p][k*ldb..]; `first` starts at +0, else at what c holds.
template <int R, int P, class T>
static inline void micro(const float* a, int64_t lda, const typename T::S* const* b, int64_t ldb, int64_t k_len,
                         float* c, int64_t ldc, bool first) {
  V16 acc[R][P];
  const typename T::S* bp[P];
  SB_UNROLL for (int p = 0; p < P; p++) bp[p] = b[p];
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = first ? vzero() : vload(c + r * ldc + p * LANES);
  for (int64_t k = 0; k < k_len; k++) {
    V16 w[P];
    SB_UNROLL for (int p = 0; p < P; p++) {
      w[p] = T::ld(bp[p]);
      if (R <= 4) __builtin_prefetch((const char*)bp[p] + 512);
      bp[p] += ldb;
    }
    SB_UNROLL for (int r = 0; r < R; r++) {
      V16 x = vset1(a[r * lda + k]);
      SB_UNROLL for (int p = 0; p < P; p++) acc[r][p] = vfma(x, w[p], acc[r][p]);
    }
  }
  SB_UNROLL for (int r = 0; r < R; r++)
    SB_UNROLL for (int p = 0; p < P; p++) vstore(c + r * ldc + p * LANES, acc[r][p]);
}

template <class T>
using MicroFn = void (*)(const float*, int64_t, const typename T::S* const*, int64_t, int64_t, float*, int64_t, bool);

template <int R, class T> static MicroFn<T> micro_wide(int panels) {
  if (panels == 4 && panels_for(R) >= 4) return micro<R, panels_for(R) >= 4 ? 4 : 1, T>;
  if (panels == 2 && panels_for(R) >= 2) return micro<R, panels_for(R) >= 2 ? 2 : 1, T>;
  return micro<R, 1, T>;
}
template <class T> static MicroFn<T> micro_of(int rows, int panels) {
  switch (rows) {
    case 1: return micro_wide<1, T>(panels);
    case 2: return micro_wide<2, T>(panels);
    case 3: return micro_wide<3, T>(panels);
    case 4: return micro_wide<4, T>(panels);
    case 5: return micro_wide<5, T>(panels);
    case 6: return micro_wide<6, T>(panels);
#if SB_AVX512
    case 7: return micro_wide<7, T>(panels);
    case 8: return micro_wide<8, T>(panels);
    case 9: return micro_wide<9, T>(panels);
    case 10: return micro_wide<10, T>(panels);
    case 11: return micro_wide<11, T>(panels);
    case 12: return micro_wide<12, T>(panels);
#endif
  }
  abort();
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

// Rows [m0, m1) and panels [p0, p1) of the product, by one thread.
template <class T> static void linear_part(const Linear& l, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
  typedef typename T::S S;
  const int64_t m = m1 - m0, k = l.k;
  if (m <= 0 || p0 >= p1) return;
  const float* a = (const float*)l.x + m0 * l.ldx;
  int64_t lda = l.ldx;
  // A copy in fp32 where the input is narrower, and where many rows a power of two apart would share cache sets.
  if (l.xdt != F32 || (m > 2 && (lda & 255) == 0)) {
    lda = ((k + 15) & ~(int64_t)15) + LANES;
    float* t = scratch<0>((size_t)(m * lda));
    SB_DISPATCH(l.xdt, TX, rows_to_f32<TX>((const typename TX::S*)l.x + m0 * l.ldx, l.ldx, m, k, t, lda));
    a = t;
  }
  const int64_t blocks = (m + MAX_ROWS - 1) / MAX_ROWS;
  const int64_t k_block = blocks == 1 ? k : (sizeof(S) == 4 ? 512 : 1024);
  // One or two rows of a large weight wait for memory: one panel after the other is one stream to prefetch.
  const bool streaming = m <= 2 && l.n * k * (int64_t)sizeof(S) > 1 << 19;
  const int most = streaming ? 1 : panels_for((int)((m + blocks - 1) / blocks));
  const int64_t ldc = MAX_PANELS * LANES;
  float* c = scratch<1>((size_t)(m * ldc));
  const int64_t full = l.n / LANES;  // the panel after these, if any, is the narrow one
  for (int64_t p = p0; p < p1;) {
    int panels = (int)(full - p < p1 - p ? full - p : p1 - p);
    if (panels > 0) panels = panels_now(panels, most);
    const S* base = (const S*)l.w + p * LANES * k;
    int cols = panels * LANES;
    if (!panels) {  // unfold the narrow panel
      cols = (int)(l.n - full * LANES);
      S* wide = (S*)scratch<2>((size_t)(k * LANES));
      for (int64_t i = 0; i < k; i++) {
        memset(wide + i * LANES, 0, sizeof(S) * LANES);
        memcpy(wide + i * LANES, base + i * cols, sizeof(S) * (size_t)cols);
      }
      base = wide;
      panels = 1;
    }
    for (int64_t k0 = 0; k0 < k || k0 == 0; k0 += k_block) {
      const int64_t kl = k - k0 < k_block ? k - k0 : k_block;
      const S* b[MAX_PANELS];
      for (int i = 0; i < panels; i++) b[i] = base + (i * k + k0) * LANES;
      for (int64_t q = 0, r = 0; q < blocks; q++) {  // rows in blocks of nearly equal height
        int rows = (int)(m * (q + 1) / blocks - r);
        micro_of<T>(rows, panels)(a + r * lda + k0, lda, b, LANES, kl, c + r * ldc, ldc, k0 == 0);
        if (k0 + k_block >= k)
          SB_DISPATCH(l.odt, TO, SB_DISPATCH(l.bdt, TB, finish<TO, TB>(l, c + r * ldc, ldc, m0 + r, rows, p * LANES, cols)));
        r += rows;
      }
    }
    p += panels;
  }
}

// The whole product: pieces of rows x panels that threads take as they come free, so that a thread the system has
// put aside holds up one piece, not half of the work.
static void linear_run(const Linear& l, int64_t m) {
  const int64_t panels = (l.n + LANES - 1) / LANES;
  const int want = threads_for(m * l.n * l.k, 1 << 16);
  const int64_t row_step = m <= 8 * MAX_ROWS ? m : 8 * MAX_ROWS, row_parts = (m + row_step - 1) / row_step;
  const int64_t pieces = 4 * want / row_parts + 1;  // along the panels
  const int64_t panel_step = want == 1 ? panels : ((panels + pieces - 1) / pieces + 3) / 4 * 4;
  const int64_t panel_parts = (panels + panel_step - 1) / panel_step;
  std::atomic<int64_t> next{0};
  parallel(want, [&](int, int) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < row_parts * panel_parts;) {
      const int64_t p0 = i / row_parts * panel_step, r0 = i % row_parts * row_step;
      const int64_t p1 = p0 + panel_step < panels ? p0 + panel_step : panels, r1 = r0 + row_step < m ? r0 + row_step : m;
      SB_DISPATCH(l.wdt, T, linear_part<T>(l, r0, r1, p0, p1));
    }
  });
}
