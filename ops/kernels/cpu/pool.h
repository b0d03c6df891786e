// Threads: the OpenMP runtime that torch itself brought, called through its own entry points. A second pool would
// spin against the first one on the same cores. Which thread does what never changes a bit: threads share out rows
// or columns of the result, never the terms of a sum.
#pragma once
#include <atomic>
#include <cstdlib>
#include "vec.h"
#if !SB_NEON
#include <xmmintrin.h>
#endif

typedef void (*parallel_fn)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*int_fn)();
struct Runtime {
  parallel_fn parallel = nullptr;  // GOMP_parallel
  int_fn thread = nullptr;         // omp_get_thread_num
  int_fn team = nullptr;           // omp_get_num_threads
  int threads = 1;
};
static Runtime runtime;

// Rounding to nearest with denormals kept, in this thread, whatever the caller had set.
struct PlainFloats {
#if SB_NEON
  uint64_t saved;
  PlainFloats() { __asm__ volatile("mrs %0, fpcr" : "=r"(saved)); uint64_t z = 0; if (saved) __asm__ volatile("msr fpcr, %0" ::"r"(z)); }
  ~PlainFloats() { if (saved) __asm__ volatile("msr fpcr, %0" ::"r"(saved)); }
#else
  unsigned saved;
  PlainFloats() : saved(_mm_getcsr()) { if ((saved & 0xffc0u) != 0x1f80u) _mm_setcsr(0x1f80u); }
  ~PlainFloats() { if ((saved & 0xffc0u) != 0x1f80u) _mm_setcsr(saved); }
#endif
};

// Denormals taken and given as zero, while `on`; for products with bf16 weights (linear.h says why).
struct FlushedFloats {
  bool on;
#if SB_NEON
  uint64_t saved = 0;
  explicit FlushedFloats(bool want) : on(want) {
    if (!on) return;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    uint64_t flush = (uint64_t)1 << 24;
    __asm__ volatile("msr fpcr, %0" ::"r"(flush) : "memory");
  }
  ~FlushedFloats() { if (on) __asm__ volatile("msr fpcr, %0" ::"r"(saved) : "memory"); }
#else
  unsigned saved = 0;
  explicit FlushedFloats(bool want) : on(want) {
    if (!on) return;
    saved = _mm_getcsr();
    _mm_setcsr(0x9fc0u);
    __asm__ volatile("" ::: "memory");  // no arithmetic between loads and stores moves out
  }
  ~FlushedFloats() {
    if (!on) return;
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(saved);
  }
#endif
};

SB_INLINE void cpu_relax() {
#if SB_NEON
  __asm__ volatile("yield");
#else
  _mm_pause();
#endif
}

// f(thread, team) on up to `want` threads; on the caller alone where one is enough or no runtime was given.
template <class F> static void parallel(int want, const F& f) {
  if (want > runtime.threads) want = runtime.threads;
  if (want <= 1 || !runtime.parallel) {
    PlainFloats plain;
    f(0, 1);
    return;
  }
  auto body = [](void* p) {
    PlainFloats plain;
    (*(const F*)p)(runtime.thread(), runtime.team());
  };
  runtime.parallel(body, (void*)&f, (unsigned)want, 0);
}

// One thread for each `grain` units of work, at least one.
SB_INLINE int threads_for(int64_t work, int64_t grain) {
  int64_t t = work / (grain > 0 ? grain : 1);
  return t < 1 ? 1 : (t > runtime.threads ? runtime.threads : (int)t);
}

struct Range { int64_t begin, end; };
// The part of [0, n) that belongs to one of `parts`, in whole units of `unit`.
SB_INLINE Range share(int64_t n, int64_t unit, int part, int parts) {
  int64_t u = (n + unit - 1) / unit;
  int64_t b = u * part / parts * unit, e = u * (part + 1) / parts * unit;
  return {b < n ? b : n, e < n ? e : n};
}

// Per-thread scratch memory that only ever grows. `slot` names independent buffers.
template <int slot> static float* scratch(size_t floats) {
  struct Buffer {
    float* p = nullptr;
    size_t n = 0;
    ~Buffer() { free(p); }
  };
  static thread_local Buffer b;
  if (b.n < floats) {
    free(b.p);
    size_t bytes = (floats * sizeof(float) + 4095) & ~(size_t)4095;
    b.p = (float*)aligned_alloc(4096, bytes);
    if (!b.p) abort();
    b.n = bytes / sizeof(float);
  }
  return b.p;
}
