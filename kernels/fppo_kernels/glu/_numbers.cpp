// The gated activation, as eager.py writes it, forward and backward, of so many numbers.

namespace {

constexpr int64_t RUN = 4096;  // numbers that a thread takes at a time

template <typename T>
struct Slope {
  T value, slope;
};

template <typename T>
inline Slope<T> silu(T x) {
  const T small = exponential(x < 0 ? x : -x), sigmoid = (x < 0 ? small : T(1)) / (1 + small);
  return {x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))};
}

template <typename T>
inline Slope<T> gelu_tanh(T x) {  // 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
  const T factor = T(0.7978845608028654), cubic = T(0.044715), u = factor * (x + cubic * x * x * x);
  const T t = tangent(u);
  return {T(0.5) * x * (1 + t), T(0.5) * (1 + t + x * (1 - t * t) * factor * (1 + 3 * cubic * x * x))};
}

template <typename T>
inline Slope<T> gelu(T x) {
  const T share = T(0.5) * (1 + std::erf(x * T(0.7071067811865476)));
  return {x * share, share + x * T(0.3989422804014327) * exponential(T(-0.5) * x * x)};
}

template <typename T, Slope<T> (*Activate)(T), typename Raw>
void forward(const Raw* gate, const Raw* up, Raw* out, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t begin = 0; begin < count; begin += RUN)
#pragma omp simd
    for (int64_t i = begin; i < std::min(begin + RUN, count); ++i)
      narrow(Activate(T(widen(gate[i]))).value * widen(up[i]), out + i);
}

// `forward` of rows [rows, 2 width], each the gate's numbers and then the other factor's.
template <typename T, Slope<T> (*Activate)(T), typename Raw>
void forward_rows(const Raw* both, Raw* out, int64_t rows, int64_t width, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const Raw* gate = both + 2 * row * width;
    forward<T, Activate>(gate, gate + width, out + row * width, width, 1);
  }
}

template <typename T, Slope<T> (*Activate)(T), typename Raw>
void backward(const Raw* gate, const Raw* up, const Raw* grad, Raw* d_gate, Raw* d_up, int64_t count,
              int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t begin = 0; begin < count; begin += RUN)
#pragma omp simd
    for (int64_t i = begin; i < std::min(begin + RUN, count); ++i) {
      const Slope<T> at = Activate(T(widen(gate[i])));
      const T slope = widen(grad[i]);
      narrow(slope * widen(up[i]) * at.slope, d_gate + i);
      narrow(slope * at.value, d_up + i);
    }
}

}  // namespace

#define FUNCTIONS(KIND, NAME, T, RAW)                                                                               \
  extern "C" void KIND##_forward_##NAME(const RAW* gate, const RAW* up, RAW* out, int64_t count, int64_t threads) { \
    forward<T, KIND<T>>(gate, up, out, count, threads);                                                             \
  }                                                                                                                 \
  extern "C" void KIND##_rows_##NAME(const RAW* both, RAW* out, int64_t rows, int64_t width, int64_t threads) {     \
    forward_rows<T, KIND<T>>(both, out, rows, width, threads);                                                      \
  }                                                                                                                 \
  extern "C" void KIND##_backward_##NAME(const RAW* gate, const RAW* up, const RAW* grad, RAW* d_gate, RAW* d_up,   \
                                         int64_t count, int64_t threads) {                                          \
    backward<T, KIND<T>>(gate, up, grad, d_gate, d_up, count, threads);                                             \
  }
#define KINDS(NAME, T, RAW) FUNCTIONS(silu, NAME, T, RAW) FUNCTIONS(gelu_tanh, NAME, T, RAW) FUNCTIONS(gelu, NAME, T, RAW)

KINDS(float32, float, float)
KINDS(float64, double, double)
KINDS(bfloat16, float, bfloat16)
