// Between [n, k] rows and panels [k][16], in place or into another place, and single rows back out of the panels.
#pragma once
#include "linear.h"

// Where element (k, column j) of a panel of `width` columns stands.
SB_INLINE int64_t place(int64_t i, int64_t j, int64_t width, int64_t k, bool pairs) {
  if (!pairs || i >= k / 2 * 2) return i * width + j;
  return (i / 2 * width + j) * 2 + (i & 1 ? 0 : 1);
}

// Panels [p0, p1) of `src` (rows of `ld` elements) to `dst`; the two may be the same memory when ld == k.
template <class S>
static void pack_panels(const S* src, int64_t ld, S* dst, int64_t n, int64_t k, int64_t p0, int64_t p1, bool pairs) {
  S* t = (S*)scratch<2>((size_t)(k * LANES * (int64_t)sizeof(S) + 3) / 4);
  for (int64_t p = p0; p < p1; p++) {
    const int64_t r0 = p * LANES, width = n - r0 < LANES ? n - r0 : LANES;
    for (int64_t kb = 0; kb < k; kb += 64)
      for (int64_t j = 0; j < width; j++)
        for (int64_t i = kb; i < kb + 64 && i < k; i++) t[place(i, j, width, k, pairs)] = src[(r0 + j) * ld + i];
    memcpy(dst + r0 * k, t, sizeof(S) * (size_t)(width * k));
  }
}

template <class S> static void unpack_row(const S* w, int64_t n, int64_t k, int64_t row, S* out, bool pairs) {
  const int64_t r0 = row / LANES * LANES, width = n - r0 < LANES ? n - r0 : LANES;
  for (int64_t i = 0; i < k; i++) out[i] = w[r0 * k + place(i, row - r0, width, k, pairs)];
}

static void pack_run(const void* src, int64_t ld, void* dst, int dt, int64_t n, int64_t k) {
  const int64_t panels = (n + LANES - 1) / LANES;
  parallel(threads_for(n * k, 1 << 16), [&](int t, int team) {
    Range r = share(panels, 1, t, team);
    if (dtype_bytes(dt) == 4) pack_panels((const uint32_t*)src, ld, (uint32_t*)dst, n, k, r.begin, r.end, dt == BF16);
    else pack_panels((const uint16_t*)src, ld, (uint16_t*)dst, n, k, r.begin, r.end, dt == BF16);
  });
}

// out[i] = row ids[i] of the weight; ids are checked by the caller.
static void take_rows_run(const void* w, int dt, int64_t n, int64_t k, const int64_t* ids, int64_t m, void* out) {
  parallel(threads_for(m * k, 1 << 14), [&](int t, int team) {
    Range r = share(m, 1, t, team);
    for (int64_t i = r.begin; i < r.end; i++) {
      if (dtype_bytes(dt) == 4) unpack_row((const uint32_t*)w, n, k, ids[i], (uint32_t*)out + i * k, false);
      else unpack_row((const uint16_t*)w, n, k, ids[i], (uint16_t*)out + i * k, dt == BF16);
    }
  });
}
