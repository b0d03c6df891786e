// Runs every kernel on the same made-up numbers and prints a hash of each result. The lines must be equal on every
// instruction set: see test_cpu_kernels.py. Inputs come from integers alone, so no libm has a say.
#include <cstdio>
#include "kernels.cpp"

static uint32_t seed = 12345;
static float number(float scale) {  // about triangular in (-2, 2) * scale
  float sum = 0;
  for (int i = 0; i < 2; i++) {
    seed = seed * 1664525u + 1013904223u;
    sum += (float)(int32_t)(seed >> 8) * (1.f / 8388608.f) - 1.f;
  }
  return sum * scale;
}
struct Numbers {  // `n` of them in the type `dt`, with room behind for vectors that look ahead
  std::vector<float> f;
  std::vector<uint16_t> h;
  int dt;
  Numbers(int64_t n, int type, float scale) : dt(type) {
    for (int64_t i = 0; i < n + 64; i++) {
      const float v = i < n ? number(scale) : 0.f;
      f.push_back(v);
      uint16_t out[LANES];
      if (dt == BF16) vstore_bf16(out, vset1(v));
      else if (dt == F16) vstore_f16(out, vset1(v));
      else out[0] = 0;
      h.push_back(out[0]);
    }
  }
  void* p() { return dt == F32 ? (void*)f.data() : (void*)h.data(); }
};
static void print(const char* name, int dt, const Numbers& v, int64_t n) {
  uint64_t hash = 1469598103934665603ull;
  const unsigned char* b = v.dt == F32 ? (const unsigned char*)v.f.data() : (const unsigned char*)v.h.data();
  for (int64_t i = 0; i < n * (int64_t)dtype_bytes(v.dt); i++) hash = (hash ^ b[i]) * 1099511628211ull;
  printf("%s %d %016llx\n", name, dt, (unsigned long long)hash);
}

static void rows(int dt) {
  const int64_t m = 3, h = 83;
  Numbers x(m * h, dt, 2.f), r(m * h, dt, 1.f), w(h, dt, 1.f), b(h, dt, 1.f), y(m * h, dt, 0.f), z(m * h, dt, 0.f);
  Numbers f(m * h, F32, 0.f);
  sb_rms_norm(x.p(), dt, m, h, 1, h, 0, w.p(), dt, 0.f, 1e-5f, y.p());
  print("rms_norm", dt, y, m * h);
  sb_add_rms_norm(x.p(), r.p(), dt, m, h, h, h, w.p(), dt, 1.f, 1e-5f, y.p(), z.p());
  print("add_rms_norm", dt, y, m * h);
  sb_layer_norm(x.p(), dt, m, h, h, w.p(), b.p(), dt, 1e-5f, y.p());
  print("layer_norm", dt, y, m * h);
  for (int log = 0; log < 2; log++) {
    sb_softmax(x.p(), dt, m, h, h, log, (float*)f.p());
    print(log ? "log_softmax" : "softmax", dt, f, m * h);
  }
  sb_sum(x.p(), dt, m, h, h, (float)h, (float*)f.p());
  print("mean", dt, f, m);
  for (int kind = SILU; kind <= RELU2; kind++) {
    sb_act(x.p(), dt, m, h, h, kind, 0, y.p());
    print("act", kind, y, m * h);
  }
}

static void products(int dt) {
  const int64_t shapes[][3] = {{1, 49, 80}, {7, 33, 13}, {13, 40, 131}, {30, 17, 1100}, {2, 5, 1}};
  for (auto& s : shapes)
    for (float scale : {1.f, 1e-20f}) {  // the small one: denormal sums, which bf16 flushes
      const int64_t m = s[0], n = s[1], k = s[2];
      Numbers x(m * k, dt, scale == 1.f || dt == F16 ? 1.f : 1e-17f), w(n * k, dt, 0.03f * scale), b(n, dt, scale), y(m * n, dt, 0.f);
      sb_pack(w.p(), k, w.p(), dt, n, k);
      const Weight weight = {w.p(), n, k, dt};
      sb_linear(&weight, x.p(), dt, k, m, scale == 1.f ? b.p() : nullptr, dt, y.p());
      print("linear", dt, y, m * n);
    }
}

static void attentions(int dt) {
  for (int64_t d : {64, 80}) {
    const int64_t len = 300, queries = 45, hq = 6, hk = 2, block = 32, blocks = 10;
    Numbers q(queries * hq * d, dt, 1.f), k(len * hk * d, dt, 1.f), v(len * hk * d, dt, 1.f);
    Numbers cache(blocks * hk * block * 2 * d, dt, 0.f), out(queries * hq * d, dt, 0.f);
    std::vector<int64_t> slots(len), positions(len);
    std::vector<int32_t> table(blocks);
    for (int64_t i = 0; i < blocks; i++) table[i] = (int32_t)((i * 7) % blocks);
    for (int64_t i = 0; i < len; i++) slots[i] = table[i / block] * block + i % block, positions[i] = i;
    Numbers angles(len * d, F32, 0.5f);
    sb_rotary(positions.data(), len, k.p(), hk * d, hk, nullptr, 0, 0, dt, angles.p(), F32, d, d, d == 64);
    print("rotary", dt, k, len * hk * d);
    sb_cache_write(k.p(), v.p(), dt, hk * d, hk * d, cache.p(), hk * block * 2 * d, block * 2 * d, slots.data(), len, hk, d, block);
    const int32_t starts[2] = {0, (int32_t)queries}, lens[1] = {(int32_t)len};
    const float slopes[6] = {.5f, .25f, .125f, .0625f, .03125f, 1.f}, sinks[6] = {1, 0, -1, 2, .5f, .25f};
    for (int style = 0; style < 4; style++) {
      Attention a = {q.p(), hq * d, cache.p(), hk * block * 2 * d, block * 2 * d, dt, table.data(), blocks, starts, lens, 1,
                     hq, hk, d, block, 0.125f, style == 1 ? 20.f : 0.f, style == 2 ? 50 : 0, 1,
                     style == 3 ? slopes : nullptr, style == 3 ? sinks : nullptr, out.p()};
      sb_attention(&a);
      print("attention", dt, out, queries * hq * d);
    }
  }
}

int main() {
  sb_runtime(nullptr, nullptr, 1);
  for (int dt : {F32, BF16, F16}) {
    rows(dt);
    products(dt);
    attentions(dt);
  }
}
