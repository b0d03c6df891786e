// Causal attention over the paged cache.
//
// Cache: [blocks, kv heads, block_size, 2 * D] by shape. Within one block and head the memory holds the keys as
// tiles of sixteen, each [D][16] (a vector is one dimension of sixteen keys), then the values as [block_size][D].
//
// Order, for one query head at position p with keys lo..p (lo > 0 under a sliding window), all in fp32:
//   score  = (sum over d ascending, one FMA each) * (scale * log2 e); with a cap or slopes instead:
//          * scale; then cap * tanh(score / cap); then + slope * (key - p); then * log2 e
//   blocks of 64 keys at multiples of 64: top = max(old top, block's max); w = 2^(score - top);
//          sums and accumulators are scaled by 2^(old top - top); lane i of sixteen sums the weights of keys
//          i, i+16, i+32, i+48; each output dimension takes the block's valid keys ascending, one FMA each
//   splits of 256 keys at multiples of 256: each starts afresh; they are merged in ascending order, a sink last
// So the bits depend on p, the window, and the keys: not on the prompt's chunks, the neighbours or the cache blocks.
#pragma once
#include <vector>
#include "linear.h"
#include "vmath.h"

constexpr int KEY_BLOCK = 64, KV_SPLIT = 256, TILES = KEY_BLOCK / LANES;

struct Attention {
  const void* q; int64_t ldq;                       // [tokens, q_heads * d]
  const void* cache; int64_t block_stride, head_stride;
  int dt;                                           // of q, cache and out
  const int32_t* table; int64_t ldt;                // [sequences, blocks]
  const int32_t* starts; const int32_t* lens;       // [sequences + 1], [sequences]
  int64_t sequences, q_heads, kv_heads, d, block_size;
  float scale, softcap; int64_t window;             // window <= 0: none
  int causal;
  const float* slopes; const float* sinks;          // [q_heads] or null
  void* out;                                        // [tokens, q_heads * d]
};

// Queries [q0, q0 + n) of one sequence and one kv head: `rows` = n * group query heads.
struct Work {
  int64_t sequence, head, q0; int rows, group;
  int64_t pos0, len;                                // position of the first query; keys of the sequence
};
// What a row has seen: top score, sum of weights, accumulators.
struct Seen { float* top; float* sum; float* acc; };

SB_INLINE void valid_keys(const Attention& a, const Work& w, int row, int64_t* lo, int64_t* hi) {
  const int64_t p = w.pos0 + row / w.group;
  *hi = a.causal ? p + 1 : w.len;
  *lo = a.window > 0 && p + 1 > a.window ? p + 1 - a.window : 0;
}

template <class T> SB_INLINE const typename T::S* cache_at(const Attention& a, const Work& w, int64_t key) {
  const int64_t block = a.table[w.sequence * a.ldt + key / a.block_size];
  return (const typename T::S*)a.cache + block * a.block_stride + w.head * a.head_stride;
}

// s[r][0..63] = raw dot products of rows [r0, r1) with tiles [t0, t1) of the key block at `key0`.
template <class T>
static void scores(const Attention& a, const Work& w, const float* q, int64_t key0, int t0, int t1, int r0, int r1, float* s) {
  for (int t = t0; t < t1;) {
    const int64_t ahead = a.causal ? (key0 + t * LANES - w.pos0) * w.group : 0;  // rows before see nothing of tile t
    const int from = ahead > r0 ? (int)ahead : r0;
    const int most = panels_for(r1 - from < MAX_ROWS ? r1 - from : MAX_ROWS), n = panels_now(t1 - t, most);
    const typename T::S* b[MAX_PANELS];
    for (int i = 0; i < n; i++) {
      const int64_t key = key0 + (t + i) * LANES;
      b[i] = cache_at<T>(a, w, key) + key % a.block_size * a.d;
    }
    for (int r = from; r < r1;) {
      const int rows = r1 - r < MAX_ROWS ? r1 - r : MAX_ROWS;
      micro_of<T>(rows, n)(q + r * a.d, a.d, b, LANES, a.d, s + r * KEY_BLOCK + t * LANES, KEY_BLOCK, true);
      r += rows;
    }
    t += n;
  }
}

// One row's scores of keys [lo, hi) of the block become weights in place. Updates top and the lane sums; returns the
// factor for the accumulators. Weights outside [lo, hi) are 2^-126 in the lane sums and are never multiplied.
SB_INLINE float weigh(const Attention& a, int64_t q_head, int64_t key0, int64_t p, int lo, int hi, float* s, float* top,
                      float* lane_sums) {
  static const float iota[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int t0 = lo / LANES, t1 = (hi + LANES - 1) / LANES;
  const bool plain = !(a.softcap > 0.f) && !a.slopes;
  const V16 by = vset1(plain ? a.scale * LOG2E : a.scale);
  V16 m = vset1(-INFINITY), v[TILES];
  SB_UNROLL for (int t = 0; t < TILES; t++) {
    if (t < t0 || t >= t1) continue;
    v[t] = vmul(vload(s + t * LANES), by);
    const V16 lane = vadd(vload(iota), vset1((float)(t * LANES)));
    if (!plain) {
      if (a.softcap > 0.f) v[t] = vmul(vtanh(vdiv(v[t], vset1(a.softcap))), vset1(a.softcap));
      if (a.slopes) v[t] = vfma(vset1(a.slopes[q_head]), vadd(lane, vset1((float)(key0 - p))), v[t]);
      v[t] = vmul(v[t], vset1(LOG2E));
    }
    if (t * LANES < lo) v[t] = vselect_lt(lane, vset1((float)lo), vset1(-INFINITY), v[t]);
    if ((t + 1) * LANES > hi) v[t] = vselect_lt(lane, vset1((float)hi), v[t], vset1(-INFINITY));
    m = vmax(m, v[t]);
  }
  const float block_top = hmax(m);
  const float now = *top > block_top ? *top : block_top;
  float factor[LANES] = {1.f};
  V16 sum = vload(lane_sums);
  if (now != *top) {  // 2^0 is exactly 1 and needs no work
    vstore(factor, vexp2_down(vset1(*top - now)));
    sum = vmul(sum, vset1(factor[0]));
  }
  SB_UNROLL for (int t = 0; t < TILES; t++) {
    if (t < t0 || t >= t1) continue;
    const V16 e = vexp2_down(vsub(v[t], vset1(now)));
    sum = vadd(sum, e);
    vstore(s + t * LANES, e);
  }
  vstore(lane_sums, sum);
  *top = now;
  return factor[0];
}

// acc[r][0..d) takes keys [lo, hi) of the block, ascending, for rows [r, r + rows), which see the same keys.
template <class T>
static void add_values(const Attention& a, const Work& w, int64_t key0, int lo, int hi, int r, int rows, const float* s, float* acc) {
  for (int j = lo; j < hi;) {
    const int64_t key = key0 + j, inside = key % a.block_size;
    const int n = (int)(hi - j < a.block_size - inside ? hi - j : a.block_size - inside);
    const typename T::S* v = cache_at<T>(a, w, key) + a.block_size * a.d + inside * a.d;
    const int most = panels_for(rows), panels = (int)(a.d / LANES);
    for (int c = 0; c < panels;) {
      const int np = panels_now(panels - c, most);
      const typename T::S* b[MAX_PANELS];
      for (int i = 0; i < np; i++) b[i] = v + (c + i) * LANES;
      micro_of<T>(rows, np)(s + r * KEY_BLOCK + j, KEY_BLOCK, b, a.d, n, acc + r * a.d + c * LANES, a.d, false);
      c += np;
    }
    j += n;
  }
}

// Split number `split` for every row of the work that has keys in it. Rows without any keep top = -inf.
template <class T>
static void attend_split(const Attention& a, const Work& w, const float* q, int64_t split, Seen seen) {
  float* s = scratch<5>((size_t)w.rows * (KEY_BLOCK + LANES));
  float* lanes = s + (size_t)w.rows * KEY_BLOCK;
  memset(lanes, 0, sizeof(float) * (size_t)w.rows * LANES);
  memset(seen.acc, 0, sizeof(float) * (size_t)w.rows * (size_t)a.d);
  for (int r = 0; r < w.rows; r++) seen.top[r] = -INFINITY;
  const int64_t end = (split + 1) * KV_SPLIT < w.len ? (split + 1) * KV_SPLIT : w.len;
  for (int64_t key0 = split * KV_SPLIT; key0 < end; key0 += KEY_BLOCK) {
    int r0 = w.rows, r1 = 0, t0 = TILES, t1 = 0;
    auto inside = [&](int r, int* lo, int* hi) {
      int64_t l, h;
      valid_keys(a, w, r, &l, &h);
      *lo = (int)(l > key0 ? (l - key0 < KEY_BLOCK ? l - key0 : KEY_BLOCK) : 0);
      *hi = (int)(h < key0 ? 0 : (h - key0 < KEY_BLOCK ? h - key0 : KEY_BLOCK));
      return *lo < *hi;
    };
    int lo, hi;
    for (int r = 0; r < w.rows; r += w.group)
      if (inside(r, &lo, &hi)) {
        if (r < r0) r0 = r;
        r1 = r + w.group;
        if (lo / LANES < t0) t0 = lo / LANES;
        if ((hi + LANES - 1) / LANES > t1) t1 = (hi + LANES - 1) / LANES;
      }
    if (r0 >= r1) continue;
    scores<T>(a, w, q, key0, t0, t1, r0, r1, s);
    for (int r = r0; r < r1; r++) {
      inside(r, &lo, &hi);
      const float f = weigh(a, w.head * w.group + r % w.group, key0, w.pos0 + r / w.group, lo, hi, s + r * KEY_BLOCK,
                            seen.top + r, lanes + r * LANES);
      if (f != 1.f)
        for (int64_t i = 0; i < a.d; i += LANES) vstore(seen.acc + r * a.d + i, vmul(vload(seen.acc + r * a.d + i), vset1(f)));
    }
    for (int r = r0; r < r1;) {  // neighbouring rows that see the same keys go together
      inside(r, &lo, &hi);
      int e = r + 1, l2, h2;
      while (e < r1 && e - r < MAX_ROWS && inside(e, &l2, &h2) && l2 == lo && h2 == hi) e++;
      add_values<T>(a, w, key0, lo, hi, r, e - r, s, seen.acc);
      r = e;
    }
  }
  for (int r = 0; r < w.rows; r++) seen.sum[r] = hsum(vload(lanes + r * LANES));
}

// total <- total merged with part, for one row of d accumulators.
SB_INLINE void merge_row(float* top, float* sum, float* acc, float part_top, float part_sum, const float* part, int64_t d) {
  if (part_top == -INFINITY && part_sum == 0.f) return;
  const float now = *top > part_top ? *top : part_top;
  float old_f[LANES], part_f[LANES];
  vstore(old_f, vexp2_down(vset1(*top - now)));
  vstore(part_f, vexp2_down(vset1(part_top - now)));
  *sum = fmaf(part_sum, part_f[0], *sum * old_f[0]);
  for (int64_t i = 0; i < d; i += LANES)
    vstore(acc + i, vfma(vload(part + i), vset1(part_f[0]), vmul(vload(acc + i), vset1(old_f[0]))));
  *top = now;
}
