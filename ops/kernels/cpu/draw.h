// The seeded draw of ops/sampling.py, and the most likely tokens of a row. Same token ids as the definition there.
// Every float step is one IEEE operation, in the definition's order, so lanes may be as wide as the machine likes.
// Work is saved only where a bound proves that a token can't win; docs/draw.md says why the bounds hold.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "pool.h"

namespace draw {

#if SB_AVX512
constexpr int W = 16;
#elif SB_AVX2
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef uint64_t VQ __attribute__((vector_size(4 * W)));  // W / 2 lanes

constexpr int BLOCK = 64;  // tokens: sixteen Philox blocks of four words
constexpr float MAX_NOISE = 22.8740f, LOWEST_T = -21.25f;
constexpr int BUCKETS = 1024;  // of 1/48 nat: 21.25 * 48 = 1020
constexpr uint32_t M0 = 0xD2511F53u, M1 = 0xCD9E8D57u, W0 = 0x9E3779B9u, W1 = 0xBB67AE85u;
constexpr float LN2 = 0.6931471824645996f, LOG2_E = 1.4426950216293335f;
constexpr float LN2_HI = 0.693359375f, LN2_LO = -0.00021219444170128554f;
constexpr float LOG_P[8] = {-0.49999991059303284f, 0.33333951234817505f,  -0.25001755356788635f, 0.19962073862552643f,
                            -0.16570493578910828f, 0.14917944371700287f, -0.14307618141174316f, 0.0873505026102066f};
constexpr float EXP_Q[5] = {0.4999999403953552f, 0.1666651964187622f, 0.04166839271783829f, 0.00836878176778555f,
                            0.0013814570847898722f};
constexpr float INF = INFINITY;

SB_INLINE VF splat(float x) { return x - (VF){}; }
SB_INLINE VI isplat(int32_t x) { return x - (VI){}; }
SB_INLINE VF load(const float* p) { VF v; memcpy(&v, p, sizeof v); return v; }
SB_INLINE VF to_float(VI a) { return __builtin_convertvector(a, VF); }
SB_INLINE VI to_int(VF a) { return __builtin_convertvector(a, VI); }  // towards zero
SB_INLINE bool any(VI m) {
#if SB_AVX512
  return _mm512_test_epi32_mask((__m512i)m, (__m512i)m) != 0;
#elif SB_AVX2
  return !_mm256_testz_si256((__m256i)m, (__m256i)m);
#else
  return vmaxvq_u32((uint32x4_t)m) != 0;
#endif
}
SB_INLINE float max_lane(VF v) {
#if SB_AVX512
  return _mm512_reduce_max_ps((__m512)v);
#elif SB_AVX2
  __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
#else
  return vmaxvq_f32((float32x4_t)v);
#endif
}

// 32 x 32 -> 64 bits on the low halves; the high halves of the inputs are ignored.
SB_INLINE VQ wide(VQ a, uint32_t m) {
#if SB_AVX512
  return (VQ)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif SB_AVX2
  return (VQ)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#else
  return (VQ)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(m));
#endif
}

struct Stream {  // what a row's Philox blocks share: keys, and the two rounds that the block number doesn't reach yet
  uint32_t k0, k1, position, c2;
  Stream(int64_t seed, int64_t choice, int64_t pos)
      : k0((uint32_t)seed), k1((uint32_t)((uint64_t)seed >> 32)), position((uint32_t)pos), c2((uint32_t)choice) {}
};

// The words of blocks n, n+2, n+4, … in the low halves of out[0..3]. High halves hold rubbish.
SB_INLINE void philox(const Stream& s, VQ n, VQ* out) {
  uint32_t k0 = s.k0, k1 = s.k1;
  const uint64_t b1 = (uint64_t)s.c2 * M1;
  const uint32_t u0 = (uint32_t)(b1 >> 32) ^ s.position ^ k0, u1 = (uint32_t)b1;
  VQ p = wide(n, M0);
  VQ c2 = (p >> 32) ^ (uint64_t)(1u ^ k1), c3 = p;  // 1: DOMAIN_TOKEN
  k0 += W0; k1 += W1;
  const uint64_t a2 = (uint64_t)u0 * M0;
  VQ b = wide(c2, M1);
  VQ c0 = (b >> 32) ^ (uint64_t)(u1 ^ k0), c1 = b;
  c2 = c3 ^ (uint64_t)((uint32_t)(a2 >> 32) ^ k1);
  c3 = (VQ){} + (a2 & 0xffffffffu);
  SB_UNROLL for (int r = 2; r < 10; r++) {
    k0 += W0; k1 += W1;
    const VQ a = wide(c0, M0);
    b = wide(c2, M1);
    c0 = (b >> 32) ^ c1 ^ (uint64_t)k0;
    c1 = b;
    c2 = (a >> 32) ^ c3 ^ (uint64_t)k1;
    c3 = a;
  }
  out[0] = c0; out[1] = c1; out[2] = c2; out[3] = c3;
}

// The words of tokens 64 b + 16 j + at + lane, j = 0..3.
SB_INLINE void words(const Stream& s, int64_t b, int at, VU* w) {
  static const uint64_t EVEN[8] = {0, 2, 4, 6, 8, 10, 12, 14};
  VQ even, e[4], o[4];
  memcpy(&even, EVEN, sizeof even);
  even += (uint64_t)(16 * b + at);
  philox(s, even, e);
  philox(s, even + 1, o);
  for (int j = 0; j < 4; j++) w[j] = (VU)((e[j] & 0xffffffffu) | (o[j] << 32));
}

SB_INLINE VF log_of(VF f, VF e) {
  VF p = splat(LOG_P[7]);
  SB_UNROLL for (int i = 6; i >= 0; i--) p = p * f + LOG_P[i];
  return (f + (f * f) * p) + e * LN2;
}
SB_INLINE VF log_v(VF x) {
  const VI bits = (VI)x, e = (bits - 0x3F3504F3) >> 23;
  return log_of((VF)(bits - (e << 23)) - 1.0f, to_float(e));
}
SB_INLINE VF rounded(VU w) {  // to float32, to nearest: both halves are exact and so is their scaling; one rounding
  return to_float((VI)(w >> 16)) * 65536.0f + to_float((VI)(w & 0xffffu));
}
SB_INLINE VF gumbel(VU w) {
  const VF v = (rounded(w) + 0.5f) * 0x1p-32f, u = (rounded(~w) + 0.5f) * 0x1p-32f;
  const VI near_one = (VI)(w < (VU){} + 0x40000000u), bits = (VI)u, e = (bits - 0x3F3504F3) >> 23;
  const VF f = near_one ? -v : (VF)(bits - (e << 23)) - 1.0f;
  return -log_v(-log_of(f, to_float(near_one ? (VI){} : e)));
}
// Never below gumbel(w): -log(-log(1 - v)) <= -log(v), and log2(v) is at least the line through its powers of two,
// which is what the bits of a float are. 0.001 is far more than all roundings here.
SB_INLINE VF noise_bound(VU w) {
  const VI bits = (VI)to_float((VI)(w >> 1));
  return (158.0f * LN2 + 0.001f) - to_float(bits) * (LN2 * 0x1p-23f);
}
SB_INLINE VI mass(VF t) {
  const VI live = t >= LOWEST_T;
  t = live ? t : (VF){};
  const VI n = to_int(t * LOG2_E - 0.5f);
  const VF nf = to_float(n), r = (t - nf * LN2_HI) - nf * LN2_LO;
  VF q = splat(EXP_Q[4]);
  SB_UNROLL for (int i = 3; i >= 0; i--) q = q * r + EXP_Q[i];
  const VF y = (r * r) * q + r + 1.0f;
  return to_int(y * (VF)((n + 157) << 23)) & live;
}
SB_INLINE int32_t mass1(float t) { return mass(splat(t))[0]; }

// Keys that sort as the one order: logit from high to low, then token id from low to high.
SB_INLINE uint64_t key_of(float x, int64_t id) {
  const float z = x + 0.0f;  // -0 is 0
  int32_t b;
  memcpy(&b, &z, 4);
  const uint32_t u = b < 0 ? ~(uint32_t)b : (uint32_t)b | 0x80000000u;
  return (uint64_t)u << 32 | (uint32_t)~(uint32_t)id;
}
SB_INLINE int64_t key_id(uint64_t k) { return (int64_t)(uint32_t)~(uint32_t)k; }
SB_INLINE float key_value(uint64_t k) {
  const uint32_t u = (uint32_t)(k >> 32), b = u & 0x80000000u ? u & 0x7fffffffu : ~u;
  float x;
  memcpy(&x, &b, 4);
  return x;
}

// One row under work. Blocks are padded views: the last block is copied with -inf behind the vocabulary.
struct Row {
  const float* x;
  int64_t vocab, blocks;
  float tail[BLOCK], best = -INF;
  float* peak;  // largest logit of each block
  const float* at(int64_t b) const { return b == vocab / BLOCK ? tail : x + b * BLOCK; }

  Row(const float* row, int64_t v) : x(row), vocab(v), blocks((v + BLOCK - 1) / BLOCK) {
    for (int64_t i = 0; i < BLOCK; i++) tail[i] = v / BLOCK * BLOCK + i < v ? row[v / BLOCK * BLOCK + i] : -INF;
    peak = scratch<4>((size_t)blocks);
    for (int64_t b = 0; b < blocks; b++) {
      const float* p = at(b);
      VF m = splat(-INF);
      SB_UNROLL for (int i = 0; i < BLOCK; i += W) { const VF y = load(p + i); m = y > m ? y : m; }  // NaN loses
      peak[b] = max_lane(m);
      best = peak[b] > best ? peak[b] : best;
    }
  }
  int64_t first_best() const {
    for (int64_t b = 0; b < blocks; b++)
      if (peak[b] == best)
        for (int64_t i = 0; i < BLOCK; i++)
          if (at(b)[i] == best) return b * BLOCK + i;
    return 0;
  }
};

// Keys of the k first tokens in the one order, and perhaps more, in no order. NaN is left out.
static void collect_top(const Row& r, int64_t k, std::vector<uint64_t>& keys) {
  keys.clear();
  float bound = -INF;  // k blocks reach it, so k tokens do
  if (k <= r.blocks) {
    static thread_local std::vector<float> peaks;
    peaks.assign(r.peak, r.peak + r.blocks);
    std::nth_element(peaks.begin(), peaks.begin() + (k - 1), peaks.end(), [](float a, float b) { return a > b; });
    bound = peaks[(size_t)k - 1];
  }
  for (int64_t b = 0; b < r.blocks; b++) {
    if (!(r.peak[b] >= bound)) continue;
    const float* p = r.at(b);
    const int64_t n = std::min<int64_t>(BLOCK, r.vocab - b * BLOCK);
    for (int64_t i = 0; i < n; i++)
      if (p[i] >= bound) keys.push_back(key_of(p[i], b * BLOCK + i));
  }
}
static void keep_first(std::vector<uint64_t>& keys, int64_t k) {
  if ((int64_t)keys.size() <= k) return;
  std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<uint64_t>());
  keys.resize((size_t)k);
}

struct Options { float inv_t; int64_t top_k, top_p, min_p; };
constexpr int64_t FULL_P = 1 << 24;
SB_INLINE int64_t target_of(int64_t total, int64_t p) {
  return (total >> 24) * p + (((total & (FULL_P - 1)) * p) >> 24);
}
SB_INLINE float shifted(const Row& r, float x, float inv_t) { return (x - r.best) * inv_t; }

// The last token that the filters keep, as a key: kept is what has that key or a larger one. 0 keeps everything.
struct Filter {
  uint64_t last = 0;
  float lowest = -INF;  // and no t below this (min_p)
};

// Walks sorted keys while the mass before is under the target. `sum` is the mass in front of them.
static uint64_t walk(const Row& r, const std::vector<uint64_t>& keys, float inv_t, int64_t sum, int64_t target) {
  uint64_t last = keys[0];
  for (uint64_t k : keys) {
    if (sum >= target) break;
    last = k;
    sum += mass1(shifted(r, key_value(k), inv_t));
  }
  return last;
}

static void filter_listed(const Row& r, const Options& o, std::vector<uint64_t>& keys, Filter& f) {
  keep_first(keys, o.top_k);
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
  f.last = keys.back();
  if (o.top_p >= FULL_P) return;
  int64_t total = 0;
  size_t n = 0;
  for (; n < keys.size(); n++) {
    const int64_t q = mass1(shifted(r, key_value(keys[n]), o.inv_t));
    if (q < o.min_p && n) break;
    total += q;
  }
  keys.resize(n);
  f.last = walk(r, keys, o.inv_t, 0, target_of(total, o.top_p));
}

// top_p over the whole row: masses by steps of 1/48 nat, then the one step where the target falls, token by token.
static void filter_mass(const Row& r, const Options& o, std::vector<uint64_t>& keys, Filter& f) {
  int64_t* hist = (int64_t*)scratch<5>(4 * BUCKETS);
  memset(hist, 0, 2 * BUCKETS * sizeof(int64_t));
  const float floor_t = std::max(f.lowest, LOWEST_T);
  const VF low = splat(floor_t);
  for (int64_t b = 0; b < r.blocks; b++) {
    if (!(shifted(r, r.peak[b], o.inv_t) >= floor_t)) continue;
    const float* p = r.at(b);
    int32_t q[BLOCK], at[BLOCK];
    SB_UNROLL for (int i = 0; i < BLOCK; i += W) {
      const VF t = (load(p + i) - r.best) * o.inv_t;
      const VI live = t >= low, m = mass(t) & live, s = to_int((live ? t : (VF){}) * -48.0f);
      memcpy(q + i, &m, sizeof m);
      memcpy(at + i, &s, sizeof s);
    }
    for (int i = 0; i < BLOCK; i += 2) {
      hist[at[i]] += q[i];
      hist[BUCKETS + at[i + 1]] += q[i + 1];
    }
  }
  int64_t total = 0, sum = 0;
  for (int i = 0; i < BUCKETS; i++) total += hist[i] += hist[BUCKETS + i];
  const int64_t target = target_of(total, o.top_p);
  int step = 0;
  while (sum + hist[step] < target) sum += hist[step++];
  keys.clear();
  for (int64_t b = 0; b < r.blocks; b++) {
    const float tb = shifted(r, r.peak[b], o.inv_t);
    if (!(tb >= floor_t) || (int)(tb * -48.0f) > step) continue;
    const float* p = r.at(b);
    for (int i = 0; i < BLOCK; i += W) {
      const VF t = (load(p + i) - r.best) * o.inv_t;
      const VI hit = (to_int((t >= low ? t : splat(floor_t)) * -48.0f) == step) & (t >= low);
      if (any(hit))
        for (int j = 0; j < W; j++)
          if (hit[j]) keys.push_back(key_of(p[i + j], b * BLOCK + i + j));
    }
  }
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
  f.last = walk(r, keys, o.inv_t, sum, target);
}

// The smallest t whose mass is at least `least` (1 .. 2**30); mass never falls as t rises.
static float lowest_with(int64_t least) {
  uint32_t in = 0, out = 0x41b00000u;  // magnitudes: 0 is in, 22 is out
  while (out - in > 1) {
    const uint32_t mid = in + (out - in) / 2, bits = mid | 0x80000000u;
    float t;
    memcpy(&t, &bits, 4);
    (mass1(t) >= least ? in : out) = mid;
  }
  const uint32_t bits = in | 0x80000000u;
  float t;
  memcpy(&t, &bits, 4);
  return t;
}

static Filter filter(const Row& r, const Options& o) {
  static thread_local std::vector<uint64_t> keys;
  Filter f;
  if (o.min_p > 0) f.lowest = lowest_with(o.min_p);
  if (o.top_k > 0 && o.top_k < r.vocab) {
    collect_top(r, o.top_k, keys);
    filter_listed(r, o, keys, f);
  } else if (o.top_p < FULL_P) {
    filter_mass(r, o, keys, f);
  }
  return f;
}

struct Winner { float score; int64_t id; };

// Scores of W tokens, into the winner. `id` is lane 0's token.
static void consider(VF t, VU w, int64_t id, Winner& win) {
  const VF score = t + gumbel(w);
  for (int i = 0; i < W; i++)
    if (score[i] > win.score || (score[i] == win.score && id + i < win.id)) win = {score[i], id + i};
}

template <bool filtered>
static int64_t pick(const Row& r, const Options& o, const Stream& s, const Filter& f) {
  const int64_t top = r.first_best();
  VU w[4];
  words(s, top / BLOCK, (int)(top % 16) / W * W, w);
  Winner win{gumbel(w[top / 16 % 4])[top % W], top};  // its t is 0, and every filter keeps it
  const float edge = filtered && f.last ? key_value(f.last) : -INF;
  const int64_t edge_id = f.last ? key_id(f.last) : r.vocab;
  for (int64_t b = 0; b < r.blocks; b++) {
    const float tb = shifted(r, r.peak[b], o.inv_t);
    if (tb + MAX_NOISE < win.score) continue;
    if (filtered && (r.peak[b] < edge || tb < f.lowest)) continue;
    const float* p = r.at(b);
    for (int at = 0; at < 16; at += W) {
      VF t[4], high = splat(-INF);
      SB_UNROLL for (int j = 0; j < 4; j++) {
        const VF x = load(p + 16 * j + at);
        t[j] = (x - r.best) * o.inv_t;
        if (filtered) {
          VI keep = x > edge;
          const VI tie = x == edge;
          if (any(tie))
            for (int i = 0; i < W; i++) keep[i] |= tie[i] & -(b * BLOCK + 16 * j + at + i <= edge_id);
          keep &= t[j] >= f.lowest;
          t[j] = keep ? t[j] : splat(-INF);
        }
        high = t[j] > high ? t[j] : high;
      }
      if (!any(high + MAX_NOISE >= win.score)) continue;
      words(s, b, at, w);
      for (int j = 0; j < 4; j++)
        if (any(t[j] + noise_bound(w[j]) >= win.score)) consider(t[j], w[j], b * BLOCK + 16 * j + at, win);
    }
  }
  return win.id;
}

static int64_t row(const float* x, int64_t vocab, const Options& o, const Stream& s) {
  const Row r(x, vocab);
  if (r.best == -INF) return 0;
  if (o.inv_t == 0.f) return r.first_best();
  if (r.best == INF) {  // only the infinite can win; their differences are 0, not NaN
    float* y = scratch<6>((size_t)vocab);
    for (int64_t i = 0; i < vocab; i++) y[i] = x[i] == INF ? 0.f : -INF;
    return row(y, vocab, o, s);
  }
  const Filter f = filter(r, o);
  return f.last || f.lowest > -INF ? pick<true>(r, o, s, f) : pick<false>(r, o, s, f);
}

template <class F> static void each_row(int64_t m, int64_t vocab, const F& f) {
  std::atomic<int64_t> next{0};  // rows cost very different times; who takes which doesn't matter
  parallel(threads_for(m * vocab, 1 << 15), [&](int, int) {
    for (int64_t i; (i = next.fetch_add(1)) < m;) f(i);
  });
}

// Row i: the given token first, then the k most likely; and the given token's place in the one order, from 1.
static void top_row(const float* x, int64_t vocab, int64_t k, int64_t token, int32_t* ids, float* values, int64_t* rank) {
  static thread_local std::vector<uint64_t> keys;
  const Row r(x, vocab);
  const float mine = x[token];
  int64_t before = 0;
  for (int64_t b = 0; b < r.blocks; b++) {
    if (!(r.peak[b] >= mine)) continue;
    const float* p = r.at(b);
    for (int64_t i = 0; i < BLOCK; i++) before += p[i] > mine || (p[i] == mine && b * BLOCK + i < token);
  }
  *rank = before + 1;
  ids[0] = (int32_t)token;
  values[0] = mine;
  if (k == 0) return;
  collect_top(r, k, keys);
  keep_first(keys, k);
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
  for (int64_t i = 0; i < k; i++) {
    const bool there = i < (int64_t)keys.size();  // short only where the row holds NaN
    ids[i + 1] = there ? (int32_t)key_id(keys[(size_t)i]) : 0;
    values[i + 1] = there ? x[ids[i + 1]] : NAN;
  }
}

template <class T> static void widen(const typename T::S* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES) {
    const int count = (int)std::min<int64_t>(LANES, n - i);
    store_n<TF32>(y + i, load_n<T>(x + i, count), count);
  }
}

}  // namespace draw

#define DRAW_API extern "C" __attribute__((visibility("default")))

// Logits of any type; 16-bit ones are widened row by row, which is exact.
DRAW_API void sb_draw(const void* x, int dt, int64_t ld, int64_t m, int64_t vocab, const float* inv_t, const int64_t* top_k,
                      const int64_t* top_p, const int64_t* min_p, const int64_t* seed, const int64_t* choice,
                      const int64_t* position, int64_t* out) {
  draw::each_row(m, vocab, [&](int64_t i) {
    const float* row = (const float*)x + i * ld;
    if (dt != F32) {
      float* wide = scratch<7>((size_t)vocab);
      SB_DISPATCH(dt, T, draw::widen<T>((const typename T::S*)x + i * ld, wide, vocab));
      row = wide;
    }
    out[i] = draw::row(row, vocab, {inv_t[i], top_k[i], top_p[i], min_p[i]}, {seed[i], choice[i], position[i]});
  });
}
DRAW_API void sb_top(const float* x, int64_t ld, int64_t m, int64_t vocab, int64_t k, const int64_t* token, int32_t* ids,
                     float* values, int64_t* rank) {
  draw::each_row(m, vocab, [&](int64_t i) {
    draw::top_row(x + i * ld, vocab, k, token[i], ids + i * (k + 1), values + i * (k + 1), rank + i);
  });
}

// For the tests: single steps, n a multiple of 16.
DRAW_API void sb_draw_steps(const uint32_t* words, const float* t, int64_t n, float* noise, float* bound, int32_t* mass) {
  PlainFloats plain;
  for (int64_t i = 0; i < n; i += draw::W) {
    draw::VU w;
    memcpy(&w, words + i, sizeof w);
    const draw::VF g = draw::gumbel(w), b = draw::noise_bound(w);
    const draw::VI q = draw::mass(draw::load(t + i));
    memcpy(noise + i, &g, sizeof g);
    memcpy(bound + i, &b, sizeof b);
    memcpy(mass + i, &q, sizeof q);
  }
}
// Every word in [from, to): how many have noise above their bound or outside [-3.1301, MAX_NOISE].
DRAW_API int64_t sb_draw_sweep_words(uint64_t from, uint64_t to) {
  PlainFloats plain;
  int64_t bad = 0;
  for (uint64_t i = from; i < to; i += draw::W) {
    draw::VU w;
    for (int j = 0; j < draw::W; j++) w[j] = (uint32_t)(i + (uint64_t)j);
    const draw::VF g = draw::gumbel(w), b = draw::noise_bound(w);
    const draw::VI ok = (g <= b) & (g <= draw::MAX_NOISE) & (g >= -3.1301f);
    for (int j = 0; j < draw::W; j++) bad += !ok[j];
  }
  return bad;
}
// Every float from -0 down to LOWEST_T and beyond: how often the mass rises as t falls.
DRAW_API int64_t sb_draw_sweep_mass() {
  PlainFloats plain;
  int64_t bad = 0;
  int32_t last = 1 << 30;
  for (uint32_t i = 0; i < 0x41b00000u; i += draw::W) {
    draw::VI bits;
    for (int j = 0; j < draw::W; j++) bits[j] = (int32_t)((i + (uint32_t)j) | 0x80000000u);
    const draw::VI q = draw::mass((draw::VF)bits);
    for (int j = 0; j < draw::W; j++) { bad += q[j] > last; last = q[j]; }
  }
  return bad;
}
