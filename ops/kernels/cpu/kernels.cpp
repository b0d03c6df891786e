// The C interface of the CPU kernels. Plain pointers and sizes; the Python side checks shapes and types.
// Strides count elements. Type codes are enum Dtype, activations enum Act.
#include "draw.h"
#include "layer.h"
#include "pack.h"
#include "probe.h"
#include "rows.h"

#define API extern "C" __attribute__((visibility("default")))

API int sb_abi() { return 2; }
API void sb_runtime(void* parallel_entry, void* thread_entry, int threads) {
  runtime.parallel = (parallel_fn)parallel_entry;
  runtime.thread = (int_fn)thread_entry;
  runtime.threads = threads;
  use_dot = dot_is_two_fmas();
}
API int sb_dot(int want) { return use_dot = want && dot_is_two_fmas(); }
API void sb_threads(int threads) { runtime.threads = threads < 1 ? 1 : threads; }

API void sb_pack(const void* src, int64_t ld, void* dst, int dt, int64_t n, int64_t k) { pack_run(src, ld, dst, dt, n, k); }
API void sb_take_rows(const Weight* w, const int64_t* ids, int64_t m, void* out) {
  take_rows_run(w->w, w->dt, w->n, w->k, ids, m, out);
}
API void sb_linear(const Weight* w, const void* x, int dt, int64_t ldx, int64_t m, const void* bias, int bias_dt, void* out) {
  linear_run({x, dt, ldx, w->w, w->dt, w->n, w->k, bias, bias_dt, out, dt, w->n}, m);
}

API void sb_rms_norm(const void* x, int dt, int64_t m, int64_t h, int64_t inner, int64_t outer_stride,
                     int64_t inner_stride, const void* w, int wdt, float offset, float eps, void* y) {
  norm_rows({(void*)x, dt, inner, outer_stride, inner_stride}, m, h, w, wdt, offset, eps, y, 1, h, 0);
}
API void sb_add_rms_norm(const void* x, const void* res, int dt, int64_t m, int64_t h, int64_t ldx, int64_t ldr,
                         const void* w, int wdt, float offset, float eps, void* y, void* new_res) {
  add_norm_rows(x, res, dt, m, h, ldx, ldr, w, wdt, offset, eps, y, new_res);
}
API void sb_layer_norm(const void* x, int dt, int64_t m, int64_t h, int64_t ldx, const void* w, const void* b, int wdt,
                       float eps, void* y) {
  SB_DISPATCH(dt, T, SB_DISPATCH(wdt, TW, for_rows(m, h, [&](int64_t i) {
    typedef typename T::S S;
    layer_norm_row<T, TW>((const S*)x + i * ldx, (const typename TW::S*)w, (const typename TW::S*)b, eps, h, (S*)y + i * h);
  })));
}
API void sb_softmax(const void* x, int dt, int64_t m, int64_t h, int64_t ldx, int want_log, float* y) {
  SB_DISPATCH(dt, T, for_rows(m, h, [&](int64_t i) {
    softmax_row<T>((const typename T::S*)x + i * ldx, h, y + i * h, want_log != 0);
  }));
}
API void sb_sum(const void* x, int dt, int64_t m, int64_t h, int64_t ldx, float divide_by, float* y) {
  SB_DISPATCH(dt, T, for_rows(m, h, [&](int64_t i) {
    const float s = sum_row<T>((const typename T::S*)x + i * ldx, h);
    y[i] = divide_by == 1.f ? s : s / divide_by;
  }));
}
API void sb_act(const void* x, int dt, int64_t m, int64_t h, int64_t ldx, int kind, int gated, void* y) {
  act_rows(x, dt, m, h, ldx, kind, gated, y);
}
API void sb_rotary(const int64_t* positions, int64_t m, void* q, int64_t ldq, int64_t q_heads, void* k, int64_t ldk,
                   int64_t k_heads, int dt, const void* cache, int cache_dt, int64_t head_size, int64_t rotary_dim,
                   int neox) {
  rotate_rows(positions, m, q, ldq, q_heads, k, ldk, k_heads, dt, cache, cache_dt, head_size, rotary_dim, neox);
}
API void sb_cache_write(const void* key, const void* value, int dt, int64_t ldk, int64_t ldv, void* cache,
                        int64_t block_stride, int64_t head_stride, const int64_t* slots, int64_t tokens, int64_t heads,
                        int64_t d, int64_t block_size) {
  write_cache(key, value, dt, ldk, ldv, cache, block_stride, head_stride, slots, tokens, heads, d, block_size);
}
API void sb_layer(const Layer* l, const Step* s) { layer_run(*l, *s); }
API void sb_moe(const Moe* a) { moe_run(*a); }
API void sb_attention(const Attention* a) { attention_run(*a); }

API void sb_burn_fma(int64_t iters, float* out) { burn_fma(iters, out); }
API void sb_read_all(const float* p, int64_t floats, float* out) { read_all(p, floats, out); }
