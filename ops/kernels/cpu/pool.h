// Threads: a few helpers beside the caller. A call is cut into parts that whoever is free takes; the caller never waits
// for a helper that has not begun, so a helper that other work keeps off its core costs nothing but its help. (An OpenMP
// team waits for every member: on a busy machine that made one token ten times slower.) Helpers wait some 50 us on
// the processor for the next call, then asleep. They take over the cores that torch's OpenMP threads are bound to.
// Which thread does what never changes a bit: threads share out rows or columns of the result, never the terms of a sum.
#pragma once
#include <pthread.h>
#include <atomic>
#include <cstdlib>
#include <new>
#include "vec.h"
#if !SB_NEON
#include <xmmintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

typedef void (*parallel_fn)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*int_fn)();
struct Runtime {
  parallel_fn parallel = nullptr;  // GOMP_parallel, asked once where its threads live
  int_fn thread = nullptr;         // omp_get_thread_num
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

constexpr int MAX_HELPERS = 255;
struct Pool {
  alignas(64) std::atomic<uint64_t> call{0};  // odd while parts may be taken
  alignas(64) std::atomic<int> next{0};       // the next part
  alignas(64) std::atomic<int> inside{0};     // helpers that look at the call
  std::atomic<int> asleep{0};
  void (*body)(const void*, int, int) = nullptr;
  const void* context = nullptr;
  int parts = 0, helpers = 0;
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
};
static Pool& pool = *new Pool;  // never destroyed: helpers may outlive static destructors

static void take_parts() {
  PlainFloats plain;
  for (int i; (i = pool.next.fetch_add(1)) < pool.parts;) pool.body(pool.context, i, pool.parts);
}

static void* helper_main(void*) {
  uint64_t seen = 0;
  for (;;) {
    for (int spins = 0; pool.call.load() == seen || !(pool.call.load() & 1); spins++) {
      cpu_relax();
      if (spins < 2000) continue;
      pthread_mutex_lock(&pool.lock);
      pool.asleep.fetch_add(1);
      while (pool.call.load() == seen || !(pool.call.load() & 1)) pthread_cond_wait(&pool.wake, &pool.lock);
      pool.asleep.fetch_sub(1);
      pthread_mutex_unlock(&pool.lock);
    }
    pool.inside.fetch_add(1);  // from here the caller waits for us, unless it has closed the call
    seen = pool.call.load();
    if (seen & 1) take_parts();
    pool.inside.fetch_sub(1);
  }
  return nullptr;
}

#if defined(__linux__)
static cpu_set_t homes[MAX_HELPERS + 1];
static void note_home(void*) {
  const int t = runtime.thread();
  if (t <= MAX_HELPERS) sched_getaffinity(0, sizeof(cpu_set_t), &homes[t]);
}
#endif

static void start_helpers(int wanted) {
  if (wanted > MAX_HELPERS) wanted = MAX_HELPERS;
  if (pool.helpers >= wanted) return;
  if (!pool.helpers)  // a forked child has no helpers yet, and an OpenMP that would hang
    pthread_atfork(nullptr, nullptr, [] {
      new (&pool) Pool;
      runtime.parallel = nullptr;
    });
#if defined(__linux__)
  static int noted = 0;
  for (int t = noted; t <= wanted; t++) sched_getaffinity(0, sizeof(cpu_set_t), &homes[t]);
  if (runtime.parallel && noted < wanted) runtime.parallel(note_home, nullptr, (unsigned)wanted + 1, 0);
  if (noted < wanted) noted = wanted;
#endif
  while (pool.helpers < wanted) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, helper_main, nullptr)) return;  // fewer helpers, the same bits
    pool.helpers++;
#if defined(__linux__)
    pthread_setaffinity_np(thread, sizeof(cpu_set_t), &homes[pool.helpers]);
#endif
    pthread_detach(thread);
  }
}

// f(part, parts) for every part of min(want, threads), by the caller and the helpers that are free.
template <class F> static void parallel(int want, const F& f) {
  if (want > runtime.threads) want = runtime.threads;
  if (want <= 1 || pool.busy.test_and_set(std::memory_order_acquire)) {  // nested, or two callers: alone
    PlainFloats plain;
    for (int i = 0; i < (want < 1 ? 1 : want); i++) f(i, want < 1 ? 1 : want);
    return;
  }
  start_helpers(runtime.threads - 1);
  pool.body = [](const void* p, int i, int n) { (*(const F*)p)(i, n); };
  pool.context = &f;
  pool.parts = want;
  pool.next.store(0);
  const uint64_t number = pool.call.load();  // even: closed
  pool.call.store(number + 1);
  if (pool.asleep.load()) {
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
  }
  take_parts();
  pool.call.store(number + 2);
  for (int spins = 0; pool.inside.load(); spins++) {
    cpu_relax();
    if (spins > 2000) sched_yield();
  }
  pool.busy.clear(std::memory_order_release);
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
