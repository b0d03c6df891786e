// What the machine can do at most, for tests/bench: fused multiply-adds and reads, with the library's own threads.
#pragma once
#include "pool.h"

// iters * 16 vectors of FMA per thread, in independent chains; `out` keeps the compiler honest.
static void burn_fma(int64_t iters, float* out) {
  parallel(runtime.threads, [&](int t, int) {
#if SB_AVX2
    constexpr int CHAINS = 6;
#else
    constexpr int CHAINS = 16;
#endif
    V16 acc[CHAINS];
    for (int c = 0; c < CHAINS; c++) acc[c] = vset1((float)c);
    const V16 a = vset1(0.9999f), b = vset1(1e-4f);
    for (int64_t i = 0; i < iters * 16 / CHAINS; i++)
      SB_UNROLL for (int c = 0; c < CHAINS; c++) acc[c] = vfma(acc[c], a, b);
    for (int c = 1; c < CHAINS; c++) acc[0] = vadd(acc[0], acc[c]);
    out[t] = hsum(acc[0]);
  });
}

static void read_all(const float* p, int64_t floats, float* out) {
  parallel(runtime.threads, [&](int t, int team) {
    const Range r = share(floats / 64, 1, t, team);
    V16 acc[4] = {vzero(), vzero(), vzero(), vzero()};
    for (int64_t i = r.begin; i < r.end; i++)
      SB_UNROLL for (int c = 0; c < 4; c++) {
        __builtin_prefetch(p + i * 64 + c * 16 + 256);
        acc[c] = vadd(acc[c], vload(p + i * 64 + c * 16));
      }
    out[t] = hsum(vadd(vadd(acc[0], acc[1]), vadd(acc[2], acc[3])));
  });
}
