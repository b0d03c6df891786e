// Draws from logits made of integers alone, and prints every token: the same text on every instruction set.
#include <cstdio>
#include "draw.h"

int main() {
  uint64_t s = 88172645463325252ull;
  auto next = [&] { s ^= s << 13; s ^= s >> 7; return s ^= s << 17; };
  const int64_t sizes[] = {1, 7, 64, 65, 1000, 5003};
  const float inv_t[] = {0.f, 1.f, 0.5f, 3.f, 1e5f};
  const int64_t top_k[] = {0, 0, 1, 40, 5000}, min_p[] = {0, 0, 1, 1 << 20, 1 << 29};
  const int64_t top_p[] = {1 << 24, 1 << 24, 15099494, 1000, 1};
  for (int64_t v : sizes) {
    std::vector<float> x((size_t)v);
    for (int n = 0; n < 60; n++) {
      for (auto& e : x) e = (float)(int32_t)(next() % 4001) / (n % 2 ? 256.f : 16.f) * (n % 5 ? 1.f : -0.f);
      if (n % 7 == 0) for (int64_t i = 0; i < v; i += 3) x[(size_t)i] = n % 2 ? -INFINITY : NAN;
      const int64_t k = top_k[next() % 5], p = top_p[next() % 5], m = min_p[next() % 5];
      const float t = inv_t[next() % 5];
      const int64_t seed = (int64_t)next(), choice = (int64_t)(next() % 5), position = (int64_t)(uint32_t)next();
      int64_t out = -1;
      sb_draw(x.data(), 0, v, 1, v, &t, &k, &p, &m, &seed, &choice, &position, &out);
      printf("%lld ", (long long)out);
    }
  }
  uint32_t w[1024], h = 2166136261u;
  float lo[1024], g[1024], b[1024];
  int32_t q[1024];
  for (int i = 0; i < 1024; i++) { w[i] = (uint32_t)next(); lo[i] = -(float)(w[i] % 23000) / 1000.f; }
  sb_draw_steps(w, lo, 1024, g, b, q);
  for (int i = 0; i < 1024; i++) {
    uint32_t gb, bb;
    memcpy(&gb, g + i, 4);
    memcpy(&bb, b + i, 4);
    h = ((h ^ gb) * 16777619u ^ bb) * 16777619u ^ (uint32_t)q[i];
  }
  printf("\n%08x %lld\n", h, (long long)sb_draw_sweep_words(4000000000u, 4000100000u));
}
