// Shares attention out to threads: by query block and kv head, and by split where a long sequence is nearly alone.
// Who computes which split never changes a bit: every split is computed alone and merged in ascending order.
#pragma once
#include "attention.h"

template <class T> static void load_queries(const Attention& a, const Work& w, float* q) {
  for (int r = 0; r < w.rows; r++) {
    const typename T::S* src = (const typename T::S*)a.q + (a.starts[w.sequence] + w.q0 + r / w.group) * a.ldq +
                               (w.head * w.group + r % w.group) * a.d;
    for (int64_t i = 0; i < a.d; i += LANES) vstore(q + r * a.d + i, T::ld(src + i));
  }
}

template <class T> static void store_row(const Attention& a, const Work& w, int r, float top, float sum, const float* acc) {
  const int64_t q_head = w.head * w.group + r % w.group;
  typename T::S* out = (typename T::S*)a.out + ((a.starts[w.sequence] + w.q0 + r / w.group) * a.q_heads + q_head) * a.d;
  float factor[LANES];
  factor[0] = 1.f;
  if (a.sinks) {
    const float sink = a.sinks[q_head] * LOG2E, now = top > sink ? top : sink;
    float e[LANES];
    vstore(factor, vexp2_down(vset1(top - now)));
    vstore(e, vexp2_down(vset1(sink - now)));
    sum = fmaf(sum, factor[0], e[0]);
  }
  const V16 by = vset1(factor[0] / sum);
  for (int64_t i = 0; i < a.d; i += LANES) T::st(out + i, vmul(vload(acc + i), by));
}

SB_INLINE void split_range(const Attention& a, const Work& w, int64_t* first, int64_t* last) {
  int64_t lo, hi, lo2, hi2;
  valid_keys(a, w, 0, &lo, &hi);
  valid_keys(a, w, w.rows - 1, &lo2, &hi2);
  *first = lo / KV_SPLIT;
  *last = (hi2 - 1) / KV_SPLIT;
}

// Floats that one split of one work needs: tops, sums, accumulators.
SB_INLINE size_t seen_floats(const Attention& a, int rows) { return (size_t)rows * (size_t)(a.d + 2); }
SB_INLINE Seen seen_in(float* p, int rows) { return {p, p + rows, p + 2 * rows}; }

template <class T> static void merge_and_store(const Attention& a, const Work& w, float* parts, int64_t splits) {
  const size_t size = seen_floats(a, w.rows);
  Seen total = seen_in(parts, w.rows);  // the first split's own place; rows without keys there are at -inf, 0, 0
  for (int r = 0; r < w.rows; r++) {
    for (int64_t i = 1; i < splits; i++) {
      Seen part = seen_in(parts + size * (size_t)i, w.rows);
      if (total.top[r] == -INFINITY && total.sum[r] == 0.f) {  // nothing yet: take the part as it is
        total.top[r] = part.top[r];
        total.sum[r] = part.sum[r];
        memcpy(total.acc + r * a.d, part.acc + r * a.d, sizeof(float) * (size_t)a.d);
      } else {
        merge_row(total.top + r, total.sum + r, total.acc + r * a.d, part.top[r], part.sum[r], part.acc + r * a.d, a.d);
      }
    }
    store_row<T>(a, w, r, total.top[r], total.sum[r], total.acc + r * a.d);
  }
}

template <class T> static void attend(const Attention& a, const Work& w) {
  int64_t first, last;
  split_range(a, w, &first, &last);
  float* q = scratch<4>((size_t)(w.rows * a.d));
  load_queries<T>(a, w, q);
  const size_t size = seen_floats(a, w.rows);
  float* parts = scratch<6>(size * (size_t)(last - first + 1));
  for (int64_t s = first; s <= last; s++) attend_split<T>(a, w, q, s, seen_in(parts + size * (size_t)(s - first), w.rows));
  merge_and_store<T>(a, w, parts, last - first + 1);
}

static std::vector<Work> attention_work(const Attention& a) {
  std::vector<Work> list;
  const int group = (int)(a.q_heads / a.kv_heads);
  int64_t per = group >= 64 ? 1 : 64 / group;
  if (per > 4) per = per / 4 * 4;  // 3 heads * 20 queries = 5 tiles of twelve rows
  for (int64_t s = 0; s < a.sequences; s++) {
    const int64_t queries = a.starts[s + 1] - a.starts[s], len = a.lens[s];
    for (int64_t q0 = (queries - 1) / per * per; queries > 0 && q0 >= 0; q0 -= per) {  // longest first
      const int rows = (int)(queries - q0 < per ? queries - q0 : per) * group;
      for (int64_t h = 0; h < a.kv_heads; h++) list.push_back({s, h, q0, rows, group, len - queries + q0, len});
    }
  }
  return list;
}

// Few works with several splits each: the splits are shared out, then the merges.
template <class T> static void attend_by_split(const Attention& a, const std::vector<Work>& list) {
  struct Unit { int work; int64_t split; size_t at; };
  std::vector<Unit> units;
  std::vector<size_t> at;
  size_t floats = 0;
  for (size_t i = 0; i < list.size(); i++) {
    int64_t first, last;
    split_range(a, list[i], &first, &last);
    at.push_back(floats);
    for (int64_t s = first; s <= last; s++) {
      units.push_back({(int)i, s, floats});
      floats += seen_floats(a, list[i].rows);
    }
  }
  float* parts = scratch<7>(floats);
  std::atomic<int> next{0};
  std::vector<std::atomic<int>> done(list.size());
  for (auto& d : done) d = 0;
  parallel(runtime.threads, [&](int, int) {
    for (int i; (i = next.fetch_add(1)) < (int)units.size();) {
      const Unit& u = units[(size_t)i];
      const size_t at_work = (size_t)u.work;
      const Work& w = list[at_work];
      float* q = scratch<4>((size_t)(w.rows * a.d));
      load_queries<T>(a, w, q);
      attend_split<T>(a, w, q, u.split, seen_in(parts + u.at, w.rows));
      int64_t first, last;
      split_range(a, w, &first, &last);
      if (done[at_work].fetch_add(1) == last - first)  // the last one to finish merges, in ascending order
        merge_and_store<T>(a, w, parts + at[at_work], last - first + 1);
    }
  });
}

template <class T> static void attention_typed(const Attention& a) {
  const std::vector<Work> list = attention_work(a);
  int64_t longest = 0, total = 0;
  for (const Work& w : list) {
    longest = w.len > longest ? w.len : longest;
    total += w.len * w.rows * a.d;
  }
  if (longest > KV_SPLIT && (int)list.size() < 4 * runtime.threads) return attend_by_split<T>(a, list);
  std::atomic<int> next{0};
  parallel(threads_for(total, 1 << 14), [&](int, int) {
    for (int i; (i = next.fetch_add(1)) < (int)list.size();) attend<T>(a, list[(size_t)i]);
  });
}
static void attention_run(const Attention& a) { SB_DISPATCH(a.dt, T, attention_typed<T>(a)); }

// Keys [tokens, kv_heads, d] and values go to their slots; a negative slot is skipped.
template <class S>
static void cache_write(const S* key, const S* value, int64_t ldk, int64_t ldv, S* cache, int64_t block_stride,
                        int64_t head_stride, const int64_t* slots, int64_t tokens, int64_t heads, int64_t d, int64_t block_size) {
  for (int64_t i = 0; i < tokens; i++) {
    if (slots[i] < 0) continue;
    const int64_t block = slots[i] / block_size, at = slots[i] % block_size;
    for (int64_t h = 0; h < heads; h++) {
      S* base = cache + block * block_stride + h * head_stride;
      S* k = base + at / LANES * LANES * d + at % LANES;
      for (int64_t j = 0; j < d; j++) k[j * LANES] = key[i * ldk + h * d + j];
      memcpy(base + block_size * d + at * d, value + i * ldv + h * d, sizeof(S) * (size_t)d);
    }
  }
}
