// Vectors of 32 bytes, which compilers know for every processor.
#include <vector>
#ifdef __clang__
#define PICK(A, B, WHOLE, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define PICK(A, B, WHOLE, ...) __builtin_shuffle(A, B, WHOLE{__VA_ARGS__})
#endif

namespace {

template <typename T>
struct Vector;
template <>
struct Vector<float> {
  typedef float type __attribute__((vector_size(32)));
  typedef int32_t whole __attribute__((vector_size(32)));
  static constexpr int64_t lanes = 8;
};
template <>
struct Vector<double> {
  typedef double type __attribute__((vector_size(32)));
  typedef int64_t whole __attribute__((vector_size(32)));
  static constexpr int64_t lanes = 4;
};
typedef Vector<float>::type floats;
typedef Vector<double>::type doubles;

template <typename T>
inline typename Vector<T>::type load(const T* from) {
  typename Vector<T>::type out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}
template <typename T>
inline floats load(const bfloat16* from) {
  typedef uint16_t halves __attribute__((vector_size(16)));
  typedef uint32_t words __attribute__((vector_size(32)));
  halves bits;
  std::memcpy(&bits, from, sizeof(bits));
  return reinterpret<floats>(__builtin_convertvector(bits, words) << 16);
}

template <typename V, typename T>
inline void store(V x, T* to) {
  std::memcpy(to, &x, sizeof(x));
}

// In lane i the sum of all lanes of x[i].
inline floats across(const floats* x) {
  typedef Vector<float>::whole whole;
  floats pairs[4], fours[2];
  for (int i = 0; i < 4; ++i) {
    const floats a = x[2 * i], b = x[2 * i + 1];
    pairs[i] = PICK(a, b, whole, 0, 8, 2, 10, 4, 12, 6, 14) + PICK(a, b, whole, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < 2; ++i) {
    const floats a = pairs[2 * i], b = pairs[2 * i + 1];
    fours[i] = PICK(a, b, whole, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(a, b, whole, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  const floats a = fours[0], b = fours[1];
  return PICK(a, b, whole, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(a, b, whole, 4, 5, 6, 7, 12, 13, 14, 15);
}
inline doubles across(const doubles* x) {
  typedef Vector<double>::whole whole;
  doubles pairs[2];
  for (int i = 0; i < 2; ++i) {
    const doubles a = x[2 * i], b = x[2 * i + 1];
    pairs[i] = PICK(a, b, whole, 0, 4, 2, 6) + PICK(a, b, whole, 1, 5, 3, 7);
  }
  return PICK(pairs[0], pairs[1], whole, 0, 1, 4, 5) + PICK(pairs[0], pairs[1], whole, 2, 3, 6, 7);
}

// `exponential` of each lane.
inline floats exponentials(floats x) {
  typedef Vector<float>::whole whole;
  const floats least = floats{} - 87.0f, bounded = x < least ? least : x;
  const floats n = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f;
  const floats r = n * 2.12194440e-4f + (n * -0.693359375f + bounded);
  floats p = floats{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const floats scaled = p * reinterpret<floats>((__builtin_convertvector(n, whole) + 127) << 23);
  return x < least ? floats{} : scaled;
}
inline doubles exponentials(doubles x) {
  for (int64_t i = 0; i < Vector<double>::lanes; ++i) x[i] = std::exp(x[i]);
  return x;
}

// What attention in training and in decoding computes alike: in an order that does not depend on where keys stand in
// memory, nor on what is worked on together. So both give the same bits.

// out[i] = the product of a row of whole vectors with row i of LANES rows `stride` apart.
template <typename T, typename Raw, typename Other>
inline void dots(const Other* row, const Raw* keys, int64_t stride, int64_t width, T* out) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  vector sums[LANES] = {};
  for (int64_t d = 0; d < width; d += LANES) {
    const vector here = load<T>(row + d);
    for (int64_t i = 0; i < LANES; ++i) sums[i] += here * load<T>(keys + i * stride + d);
  }
  store(across(sums), out);
}

// Scores from `low` to `high`, whole vectors of them, to exp(score - largest); the largest of them and of the sink.
template <typename T>
T exponentiate(T* scores, int64_t low, int64_t high, const T* sink) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  vector peaks = load<T>(scores + low);
  for (int64_t c = low + LANES; c < high; c += LANES) {
    const vector here = load<T>(scores + c);
    peaks = here > peaks ? here : peaks;
  }
  T largest = sink == nullptr ? peaks[0] : *sink;
  for (int64_t i = 0; i < LANES; ++i) largest = peaks[i] > largest ? peaks[i] : largest;
  for (int64_t c = low; c < high; c += LANES) store(exponentials(load<T>(scores + c) - largest), scores + c);
  return largest;
}

// What the weighed sum of values is divided by: the sum of their weights, one after the other, and the sink's.
template <typename T>
inline T denominator(T sum, T largest, const T* sink) {
  return sink == nullptr ? sum : sum + exponential(*sink - largest);
}

}  // namespace
