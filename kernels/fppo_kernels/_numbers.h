// Numbers as tensors hold them and as they are computed with; what every file in C++ of this package begins with.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("tree-loop-vectorize", "fp-contract=fast")  // inductor turns both off
#ifdef __AVX512F__
#pragma GCC target("prefer-vector-width=512")
#endif
#elif defined(__clang__)
#pragma clang fp contract(fast)
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

struct bfloat16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To reinterpret(From from) {
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(bfloat16 x) { return reinterpret<float>(uint32_t(x.bits) << 16); }

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, bfloat16* out) {  // to the nearest, of two the even one
  const uint32_t bits = reinterpret<uint32_t>(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
  out->bits = x == x ? rounded >> 16 : 0x7fc0;
}

// exp(x) of a number up to 88: 2^n exp(r) with |r| <= log(2) / 2, by the polynomial of Cephes' expf.
inline float exponential(float x) {
  const float bounded = x < -87.0f ? -87.0f : x;
  const float n = __builtin_fmaf(bounded, 1.44269504f, 12582912.0f) - 12582912.0f;  // rounds to a whole number
  const float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, bounded));
  float p = 1.9875691500e-4f;
  p = __builtin_fmaf(p, r, 1.3981999507e-3f);
  p = __builtin_fmaf(p, r, 8.3334519073e-3f);
  p = __builtin_fmaf(p, r, 4.1665795894e-2f);
  p = __builtin_fmaf(p, r, 1.6666665459e-1f);
  p = __builtin_fmaf(p, r, 5.0000001201e-1f);
  p = __builtin_fmaf(p, r * r, r) + 1.0f;
  const float scaled = p * reinterpret<float>((int32_t(n) + 127) << 23);
  return reinterpret<float>(reinterpret<int32_t>(scaled) & (x < -87.0f ? 0 : -1));  // a branch would not be vectorised
}
inline double exponential(double x) { return std::exp(x); }

// tanh(x), to within the rounding of 1.
inline float tangent(float x) {
  const float small = exponential(x < 0 ? 2 * x : -2 * x), size = (1 - small) / (1 + small);
  return x < 0 ? -size : size;
}
inline double tangent(double x) { return std::tanh(x); }

}  // namespace
