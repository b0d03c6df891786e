// Mixture of experts: y[m] = sum over slots s of weight[m][s] * down(act(up(x[m]))) with the expert of slot s.
// Rows are gathered by expert and each expert's products are linear.h's, so a row never sees its neighbours. The
// up product and the activation are rounded to x's type; the down product stays fp32; slots are added in slot order,
// one FMA each from +0, and the sum is rounded once.
#pragma once
#include "linear.h"
#include "rows.h"

struct Weight { const void* w; int64_t n, k; int32_t dt; };

struct Moe {
  const Weight* const* up; const Weight* const* down; int64_t experts;
  const void* x; int dt; int64_t ldx, m, h;
  const float* weights; const int32_t* ids; int64_t slots;  // [m, slots]; a negative id takes no part
  int kind, gated;
  void* out;  // [m, h]
};

static void moe_run(const Moe& a) {
  const int64_t pairs = a.m * a.slots, up_n = a.up[0]->n, mid = a.gated ? up_n / 2 : up_n;
  const size_t size = dtype_bytes(a.dt);
  std::vector<int32_t> order, first((size_t)a.experts + 1, 0);
  for (int64_t i = 0; i < pairs; i++)
    if (a.ids[i] >= 0 && a.ids[i] < a.experts) first[(size_t)a.ids[i] + 1]++;
  for (size_t e = 0; e < (size_t)a.experts; e++) first[e + 1] += first[e];
  order.resize((size_t)first[(size_t)a.experts]);
  std::vector<int32_t> at(first.begin(), first.end() - 1);
  for (int64_t i = 0; i < pairs; i++)
    if (a.ids[i] >= 0 && a.ids[i] < a.experts) order[(size_t)at[(size_t)a.ids[i]]++] = (int32_t)i;

  char* in = (char*)scratch<8>((size_t)(pairs * a.h) * size / 4 + 1);
  char* up = (char*)scratch<9>((size_t)(pairs * up_n) * size / 4 + 1);
  char* act = (char*)scratch<10>((size_t)(pairs * mid) * size / 4 + 1);
  float* parts = scratch<11>((size_t)(pairs * a.h));  // by place in `order`
  std::vector<int32_t> place((size_t)pairs, -1);
  for (size_t i = 0; i < order.size(); i++) {
    place[(size_t)order[i]] = (int32_t)i;
    memcpy(in + i * (size_t)a.h * size, (const char*)a.x + (size_t)(order[i] / a.slots * a.ldx) * size, (size_t)a.h * size);
  }
  for (size_t e = 0; e < (size_t)a.experts; e++) {
    const size_t b = (size_t)first[e];
    const int64_t n = first[e + 1] - first[e];
    if (!n) continue;
    const Weight &u = *a.up[e], &d = *a.down[e];
    char* up_e = up + b * (size_t)up_n * size;
    char* act_e = act + b * (size_t)mid * size;
    linear_run({in + b * (size_t)a.h * size, a.dt, a.h, u.w, u.dt, u.n, u.k, nullptr, 0, up_e, a.dt, up_n}, n);
    SB_DISPATCH(a.dt, T, for_rows(n, 4 * mid, [&](int64_t i) {
      typedef typename T::S S;
      act_row<T>((const S*)up_e + i * up_n, mid, a.kind, a.gated != 0, (S*)act_e + i * mid);
    }));
    linear_run({act_e, a.dt, mid, d.w, d.dt, d.n, d.k, nullptr, 0, parts + b * (size_t)a.h, F32, a.h}, n);
  }
  SB_DISPATCH(a.dt, T, for_rows(a.m, a.h * a.slots, [&](int64_t i) {
    for (int64_t j = 0; j < a.h; j += LANES) {
      V16 sum = vzero();
      for (int64_t s = 0; s < a.slots; s++) {
        const int32_t p = place[(size_t)(i * a.slots + s)];
        if (p >= 0) sum = vfma(load_n<TF32>(parts + (int64_t)p * a.h + j, left(a.h, j)), vset1(a.weights[i * a.slots + s]), sum);
      }
      store_n<T>((typename T::S*)a.out + i * a.h + j, sum, left(a.h, j));
    }
  }));
}
