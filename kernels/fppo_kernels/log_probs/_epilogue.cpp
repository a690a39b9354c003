// What chunked.py does with a slab of raw logits, hidden @ weight.T [rows, width], in one pass over it.

namespace {

constexpr int64_t PART = 1024;  // numbers of a row that are worked on together

// z - largest, finite for the logit -inf of a token that the head excludes, as 0 * inf is not a number; nan stays nan.
template <typename T>
inline T below(T z, T largest) {
  const T x = z - largest;
  return x < T(-1e18) ? T(-1e18) : x;
}

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
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const T bent = tangent(z[j] / rule.softcap);
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

// What is known of each row's softmax after some columns: the largest logit z, sum exp(z - maximum), the sums of that
// times (z - maximum) and of its square, and the logit of the label, once its column was among them.
template <typename T>
struct Known {
  T *maximum, *sum, *dot, *squares, *label;
};

// Takes in the next columns, `first` and on. A row is gone through in parts that begin at the same columns however many
// rows and columns come at a time, so its bits do not depend on that; slabs are to be whole parts wide, but the last.
template <typename T, typename Raw>
void measure(const Raw* raw, int64_t rows, int64_t width, const Rule<T>& rule, const int64_t* labels, int64_t first,
             const Known<T>& known, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    T z[PART], bend[PART], largest = known.maximum[row], sum = known.sum[row], dot = known.dot[row];
    T squares = known.squares[row];
    for (int64_t begin = 0; begin < width; begin += PART) {
      const int64_t count = std::min(PART, width - begin), label = labels[row] - first - begin;
      const T here = finish<T>(raw + row * width + begin, count, rule, rule.bias + begin, row, z, bend);
      if (label >= 0 && label < count) known.label[row] = z[label];
      if (first + begin == 0) largest = here;
      if (here > largest) {
        const T down = exponential(largest - here);
        dot = down * (dot + sum * (largest - here));
        sum *= down;
        squares *= down * down;
        largest = here;
      }
      T* x = bend;  // the softcap's slope is not needed here
#pragma omp simd  // with the exponential in one loop GCC threads the two comparisons, and vectorises neither
      for (int64_t j = 0; j < count; ++j) x[j] = below(z[j], largest);
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) z[j] = exponential(x[j]);
      T part_sum = 0, part_dot = 0, part_squares = 0;
#pragma omp simd reduction(+ : part_sum, part_dot, part_squares)
      for (int64_t j = 0; j < count; ++j) {
        part_sum += z[j];
        part_dot += z[j] * x[j];
        part_squares += z[j] * z[j];
      }
      sum += part_sum;
      dot += part_dot;
      squares += part_squares;
    }
    known.maximum[row] = largest, known.sum[row] = sum, known.dot[row] = dot, known.squares[row] = squares;
  }
}

// The moments, see _moments.py, in the place of what is known of each row.
template <typename T>
void conclude(int64_t rows, const Known<T>& known) {
  for (int64_t row = 0; row < rows; ++row) {
    const T sum = known.sum[row], log_sum = std::log(sum);
    known.sum[row] = log_sum;
    known.dot[row] = log_sum - known.dot[row] / sum;
    known.squares[row] /= sum * sum;
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
        const T x = below(z[j], largest), p = exponential(x - total);
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
                                 double scale, double softcap, const int64_t* labels, int64_t first, T* maximum,   \
                                 T* sum, T* dot, T* squares, T* label, int64_t threads) {                           \
    const Rule<T> rule{bias, temperature, T(scale), T(softcap)};                                                    \
    measure<T>(raw, rows, width, rule, labels, first, {maximum, sum, dot, squares, label}, threads);                \
  }                                                                                                                 \
  extern "C" void conclude_##NAME(int64_t rows, T* maximum, T* sum, T* dot, T* squares, T* label, int64_t) {        \
    conclude<T>(rows, {maximum, sum, dot, squares, label});                                                         \
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
