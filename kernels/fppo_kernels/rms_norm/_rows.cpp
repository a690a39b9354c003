// The root-mean-square norm of rows [rows, width], as eager.py writes it, forward and backward.

namespace {

// `residual`, unless null, is added to x first, and `total` is their sum; `scales` are 1 / sqrt(mean(x^2) + eps).
template <typename T, typename Raw>
void normalise(const Raw* x, const Raw* residual, const Raw* weight, Raw* out, Raw* total, T* scales, int64_t rows,
               int64_t width, T eps, T offset, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * width;
    const Raw* numbers = x + at;
    T sum = 0;
    if (residual != nullptr) {
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) narrow(widen(x[at + j]) + widen(residual[at + j]), total + at + j);
      numbers = total + at;
    }
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; ++j) sum += widen(numbers[j]) * widen(numbers[j]);
    const T scale = T(1) / std::sqrt(sum / T(width) + eps);
    scales[row] = scale;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) narrow(widen(numbers[j]) * scale * (widen(weight[j]) + offset), out + at + j);
  }
}

// d_x = scale (h - n mean(h n)) with n = x scale and h = grad (weight + offset), and what reaches the sum itself added.
// `d_weight` [parts, width], of 0, gets the sums over so many runs of rows; or it is null.
template <typename T, typename Raw>
void differentiate(const Raw* x, const Raw* weight, const T* scales, const Raw* grad, const Raw* d_total, Raw* d_x,
                   T* d_weight, int64_t rows, int64_t width, int64_t parts, T offset, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
      const int64_t at = row * width;
      const T scale = scales[row];
      T dot = 0;
#pragma omp simd reduction(+ : dot)
      for (int64_t j = 0; j < width; ++j)
        dot += widen(grad[at + j]) * (widen(weight[j]) + offset) * (widen(x[at + j]) * scale);
      const T mean = dot / T(width);
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        const T normed = widen(x[at + j]) * scale, slope = widen(grad[at + j]) * (widen(weight[j]) + offset);
        const T more = d_total == nullptr ? T(0) : T(widen(d_total[at + j]));
        narrow(scale * (slope - normed * mean) + more, d_x + at + j);
      }
      if (d_weight != nullptr)
#pragma omp simd
        for (int64_t j = 0; j < width; ++j)
          d_weight[part * width + j] += widen(grad[at + j]) * (widen(x[at + j]) * scale);
    }
}

}  // namespace

#define FUNCTIONS(NAME, T, RAW)                                                                                      \
  extern "C" void normalise_##NAME(const RAW* x, const RAW* residual, const RAW* weight, RAW* out, RAW* total,      \
                                   T* scales, int64_t rows, int64_t width, double eps, double offset,               \
                                   int64_t threads) {                                                                \
    normalise<T>(x, residual, weight, out, total, scales, rows, width, T(eps), T(offset), threads);                 \
  }                                                                                                                  \
  extern "C" void differentiate_##NAME(const RAW* x, const RAW* weight, const T* scales, const RAW* grad,           \
                                       const RAW* d_total, RAW* d_x, T* d_weight, int64_t rows, int64_t width,      \
                                       int64_t parts, double offset, int64_t threads) {                              \
    differentiate<T>(x, weight, scales, grad, d_total, d_x, d_weight, rows, width, parts, T(offset), threads);      \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
