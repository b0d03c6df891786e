// One decoder layer in one call: norm, qkv, (norm of heads), rotary, cache write, attention, output projection, add and
// norm, gate-up, activation, down. It calls the same functions as the single operations, in the same order and with the
// same roundings between them, hence the same bits; it only saves the way back through Python.
#pragma once
#include "attention_run.h"
#include "moe.h"

struct Layer {
  const Weight* qkv; const Weight* o; const Weight* up; const Weight* down;
  const void* qkv_bias; const void* o_bias; const void* up_bias; const void* down_bias;  // or null; of type `bias_dt`
  const void* norm_in; const void* norm_post; const void* norm_q; const void* norm_k;    // the last two or null
  int bias_dt, norm_dt;
  float eps, norm_offset;
  int64_t q_heads, kv_heads, d, rotary_dim;
  const void* cos_sin; int cos_sin_dt, neox;                                              // cos_sin null: no rotary
  int kind, gated;
  float scale, softcap; int64_t window;
  const float* slopes; const float* sinks;
};
struct Step {
  const void* hidden; const void* residual;  // [m, h] each; residual null in the first layer
  void* hidden_out; void* residual_out;      // [m, h]
  int dt; int64_t m, h;
  const int64_t* positions; const int64_t* slots; int64_t tokens;  // tokens <= m: the rest is padding
  void* cache; int64_t block_stride, head_stride, block_size;
  const int32_t* table; int64_t ldt; const int32_t* starts; const int32_t* lens; int64_t sequences;
};

static void norm_rows(const Rows& x, int64_t m, int64_t h, const void* w, int wdt, float offset, float eps, void* y,
                      int64_t y_inner, int64_t y_outer, int64_t y_stride) {
  const Rows out = {y, x.dt, y_inner, y_outer, y_stride};
  SB_DISPATCH(x.dt, T, SB_DISPATCH(wdt, TW, for_rows(m, h, [&](int64_t i) {
    rms_row<T, TW>(row_at<T>(x, i), nullptr, nullptr, (const typename TW::S*)w, offset, eps, h, row_at<T>(out, i));
  })));
}
static void add_norm_rows(const void* x, const void* res, int dt, int64_t m, int64_t h, int64_t ldx, int64_t ldr,
                          const void* w, int wdt, float offset, float eps, void* y, void* new_res) {
  SB_DISPATCH(dt, T, SB_DISPATCH(wdt, TW, for_rows(m, h, [&](int64_t i) {
    typedef typename T::S S;
    rms_row<T, TW>((const S*)x + i * ldx, (const S*)res + i * ldr, (S*)new_res + i * h, (const typename TW::S*)w, offset,
                   eps, h, (S*)y + i * h);
  })));
}
static void act_rows(const void* x, int dt, int64_t m, int64_t h, int64_t ldx, int kind, int gated, void* y) {
  SB_DISPATCH(dt, T, for_rows(m, 4 * h, [&](int64_t i) {
    act_row<T>((const typename T::S*)x + i * ldx, h, kind, gated != 0, (typename T::S*)y + i * h);
  }));
}
static void rotate_rows(const int64_t* positions, int64_t m, void* q, int64_t ldq, int64_t q_heads, void* k, int64_t ldk,
                        int64_t k_heads, int dt, const void* cache, int cache_dt, int64_t head_size, int64_t rotary_dim,
                        int neox) {
  const int64_t half = rotary_dim / 2;
  SB_DISPATCH(dt, T, for_rows(m, (q_heads + k_heads) * rotary_dim, [&](int64_t i) {
    typedef typename T::S S;
    float* cs = scratch<3>((size_t)rotary_dim + 2 * LANES);
    const int64_t at = positions[i] * rotary_dim;
    SB_DISPATCH(cache_dt, TC, {
      for (int64_t j = 0; j < rotary_dim; j += LANES)
        store_n<TF32>(cs + j, load_n<TC>((const typename TC::S*)cache + at + j, left(rotary_dim, j)), left(rotary_dim, j));
    });
    for (int64_t h = 0; h < q_heads; h++) rotate_head<T>((S*)q + i * ldq + h * head_size, cs, cs + half, half, neox != 0);
    for (int64_t h = 0; h < k_heads; h++) rotate_head<T>((S*)k + i * ldk + h * head_size, cs, cs + half, half, neox != 0);
  }));
}

static void write_cache(const void* key, const void* value, int dt, int64_t ldk, int64_t ldv, void* cache,
                        int64_t block_stride, int64_t head_stride, const int64_t* slots, int64_t tokens, int64_t heads,
                        int64_t d, int64_t block_size) {
  parallel(threads_for(tokens * heads * d, 1 << 15), [&](int t, int team) {
    const Range r = share(tokens, 1, t, team);
    const size_t bytes = dtype_bytes(dt);
    const char* k = (const char*)key + (size_t)(r.begin * ldk) * bytes;
    const char* v = (const char*)value + (size_t)(r.begin * ldv) * bytes;
    if (bytes == 4)
      cache_write((const uint32_t*)k, (const uint32_t*)v, ldk, ldv, (uint32_t*)cache, block_stride, head_stride,
                  slots + r.begin, r.end - r.begin, heads, d, block_size);
    else
      cache_write((const uint16_t*)k, (const uint16_t*)v, ldk, ldv, (uint16_t*)cache, block_stride, head_stride,
                  slots + r.begin, r.end - r.begin, heads, d, block_size);
  });
}

static void linear_of(const Weight* w, const void* x, int dt, int64_t m, const void* bias, int bias_dt, void* out) {
  linear_run({x, dt, w->k, w->w, w->dt, w->n, w->k, bias, bias_dt, out, dt, w->n}, m);
}
template <int slot> static char* rows_of(const Step& s, int64_t width) {
  return (char*)scratch<slot>(((size_t)(s.m * width) * dtype_bytes(s.dt) + 3) / 4 + LANES);
}

static void layer_run(const Layer& l, const Step& s) {
  const size_t size = dtype_bytes(s.dt);
  const int64_t q = l.q_heads * l.d, kv = l.kv_heads * l.d, wide = q + 2 * kv, mid = l.down->k;
  char* x = rows_of<12>(s, s.h);
  if (s.residual) {
    add_norm_rows(s.hidden, s.residual, s.dt, s.m, s.h, s.h, s.h, l.norm_in, l.norm_dt, l.norm_offset, l.eps, x, s.residual_out);
  } else {
    memcpy(s.residual_out, s.hidden, (size_t)(s.m * s.h) * size);
    norm_rows({(void*)s.hidden, s.dt, 1, s.h, 0}, s.m, s.h, l.norm_in, l.norm_dt, l.norm_offset, l.eps, x, 1, s.h, 0);
  }
  char* qkv = rows_of<13>(s, wide);
  linear_of(l.qkv, x, s.dt, s.m, l.qkv_bias, l.bias_dt, qkv);
  char *k = qkv + (size_t)q * size, *v = k + (size_t)kv * size;
  if (l.norm_q) {  // in place: a head is read whole before it is written
    norm_rows({qkv, s.dt, l.q_heads, wide, l.d}, s.m * l.q_heads, l.d, l.norm_q, l.norm_dt, l.norm_offset, l.eps, qkv,
              l.q_heads, wide, l.d);
    norm_rows({k, s.dt, l.kv_heads, wide, l.d}, s.m * l.kv_heads, l.d, l.norm_k, l.norm_dt, l.norm_offset, l.eps, k,
              l.kv_heads, wide, l.d);
  }
  if (l.cos_sin)
    rotate_rows(s.positions, s.m, qkv, wide, l.q_heads, k, wide, l.kv_heads, s.dt, l.cos_sin, l.cos_sin_dt, l.d,
                l.rotary_dim, l.neox);
  write_cache(k, v, s.dt, wide, wide, s.cache, s.block_stride, s.head_stride, s.slots, s.tokens, l.kv_heads, l.d, s.block_size);
  char* seen = rows_of<14>(s, q);
  if (s.tokens < s.m) memset(seen + (size_t)(s.tokens * q) * size, 0, (size_t)((s.m - s.tokens) * q) * size);
  attention_run({qkv, wide, s.cache, s.block_stride, s.head_stride, s.dt, s.table, s.ldt, s.starts, s.lens, s.sequences,
                 l.q_heads, l.kv_heads, l.d, s.block_size, l.scale, l.softcap, l.window, 1, l.slopes, l.sinks, seen});
  char* mixed = rows_of<15>(s, s.h);
  linear_of(l.o, seen, s.dt, s.m, l.o_bias, l.bias_dt, mixed);
  add_norm_rows(mixed, s.residual_out, s.dt, s.m, s.h, s.h, s.h, l.norm_post, l.norm_dt, l.norm_offset, l.eps, x, s.residual_out);
  char* up = rows_of<16>(s, l.up->n);
  linear_of(l.up, x, s.dt, s.m, l.up_bias, l.bias_dt, up);
  char* act = rows_of<17>(s, mid);
  act_rows(up, s.dt, s.m, mid, l.up->n, l.kind, l.gated, act);
  linear_of(l.down, act, s.dt, s.m, l.down_bias, l.bias_dt, s.hidden_out);
}
