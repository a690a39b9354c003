// What chunked.py does with a slab of raw logits, hidden @ weight.T [rows, width], in one pass over it.

namespace {

constexpr int64_t PART = 1024;  // numbers of a row that are worked on together

template <typename T>
struct Rule {
  const T* bias;         // [width], or null
  const T* temperature;  // [rows], or null
  T scale, softcap;      // softcap 0: none
};

// The logits of a part of a row into `z`, and into `bend` their slope by what the softcap bends; the largest of them.
template <typename T, typename Raw>
inline T finish(const Raw* raw, int64_t count, const Rule<T>& rule, const T* bias, int64_t row, T* z, T* bend) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) z[j] = widen(raw[j]);
  if (rule.bias != nullptr)
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) z[j] += bias[j];
  if (rule.scale != T(1))
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) z[j] *= rule.scale;
  if (rule.softcap != T(0))
    for (int64_t j = 0; j < count; ++j) {
      const T bent = std::tanh(z[j] / rule.softcap);
      bend[j] = 1 - bent * bent;
      z[j] = bent * rule.softcap;
    }
  if (rule.temperature != nullptr) {
    const T temperature = rule.temperature[row];
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) z[j] /= temperature;
  }
  T largest = -std::numeric_limits<T>::max();
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < count; ++j) largest = z[j] > largest ? z[j] : largest;
  return largest;
}

// The moments of each row's softmax, see _moments.py; `entropy` and `sum_squared` may be null.
template <typename T, typename Raw>
void measure(const Raw* raw, int64_t rows, int64_t width, const Rule<T>& rule, T* maximum, T* log_sum, T* entropy,
             T* sum_squared, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    T z[PART], bend[PART], largest = 0, sum = 0, dot = 0, squares = 0;
    for (int64_t begin = 0; begin < width; begin += PART) {
      const int64_t count = std::min(PART, width - begin);
      const T here = finish<T>(raw + row * width + begin, count, rule, rule.bias + begin, row, z, bend);
      if (begin == 0) largest = here;
      if (here > largest) {
        const T down = exponential(largest - here);
        dot = down * (dot + sum * (largest - here));
        sum *= down;
        squares *= down * down;
        largest = here;
      }
      T part_sum = 0, part_dot = 0, part_squares = 0;
#pragma omp simd reduction(+ : part_sum, part_dot)
      for (int64_t j = 0; j < count; ++j) {
        const T x = z[j] - largest;
        z[j] = exponential(x);
        part_sum += z[j];
        part_dot += z[j] * x;
      }
      if (sum_squared != nullptr)
#pragma omp simd reduction(+ : part_squares)
        for (int64_t j = 0; j < count; ++j) part_squares += z[j] * z[j];
      sum += part_sum;
      dot += part_dot;
      squares += part_squares;
    }
    maximum[row] = largest;
    log_sum[row] = std::log(sum);
    if (entropy != nullptr) entropy[row] = std::log(sum) - dot / sum;
    if (sum_squared != nullptr) sum_squared[row] = squares / (sum * sum);
  }
}

// p * (constant + linear * (z - maximum) + squared * p) in the place of the raw logits, with the p of the softmax over
// the whole vocabulary, whose moments these are; `linear` and `squared` may be null.
template <typename T, typename Raw>
void differentiate(Raw* raw, int64_t rows, int64_t width, const Rule<T>& rule, const T* maximum, const T* log_sum,
                   const T* constant, const T* linear, const T* squared, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    T z[PART], bend[PART];
    const T largest = maximum[row], total = log_sum[row], first = constant[row];
    const T second = linear == nullptr ? 0 : linear[row], third = squared == nullptr ? 0 : squared[row];
    for (int64_t begin = 0; begin < width; begin += PART) {
      const int64_t count = std::min(PART, width - begin);
      Raw* out = raw + row * width + begin;
      finish<T>(out, count, rule, rule.bias + begin, row, z, bend);
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) {
        const T x = z[j] - largest, p = exponential(x - total);
        z[j] = p * (first + second * x + third * p);
      }
      if (rule.softcap != T(0))
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) z[j] *= bend[j];
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) narrow(z[j], out + j);
    }
  }
}

}  // namespace

#define FUNCTIONS(NAME, T, RAW)                                                                                     \
  extern "C" void measure_##NAME(const RAW* raw, int64_t rows, int64_t width, const T* bias, const T* temperature, \
                                 double scale, double softcap, T* maximum, T* log_sum, T* entropy, T* sum_squared, \
                                 int64_t threads) {                                                                 \
    const Rule<T> rule{bias, temperature, T(scale), T(softcap)};                                                    \
    measure<T>(raw, rows, width, rule, maximum, log_sum, entropy, sum_squared, threads);                            \
  }                                                                                                                 \
  extern "C" void differentiate_##NAME(RAW* raw, int64_t rows, int64_t width, const T* bias, const T* temperature, \
                                       double scale, double softcap, const T* maximum, const T* log_sum,           \
                                       const T* constant, const T* linear, const T* squared, int64_t threads) {    \
    const Rule<T> rule{bias, temperature, T(scale), T(softcap)};                                                    \
    differentiate<T>(raw, rows, width, rule, maximum, log_sum, constant, linear, squared, threads);                 \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
