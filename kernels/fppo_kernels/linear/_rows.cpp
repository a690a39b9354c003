// Products of few rows with a weight as it is stored, [outs, width], which is read once, from the first number to the
// last. Compilers may round the sums of one row otherwise than those of several.

namespace {

constexpr int64_t AHEAD = 512;  // bytes between what is computed with and what is fetched

// The numbers behind the last whole vector of a row, and zeros.
template <typename T, typename Raw>
inline typename Vector<T>::type rest(const Raw* from, int64_t count) {
  T filled[Vector<T>::lanes] = {};
  for (int64_t i = 0; i < count; ++i) filled[i] = widen(from[i]);
  return load<T>(filled);
}

// Products of `ROWS` rows with `OUTS` rows of the weight, in float32 or wider, rounded once.
template <int64_t ROWS, int64_t OUTS, typename T, typename Raw>
inline void tile(const Raw* x, const Raw* weight, const Raw* bias, Raw* out, int64_t width, int64_t stride) {
  typedef typename Vector<T>::type vector;
  constexpr int64_t LANES = Vector<T>::lanes;
  const int64_t whole = width / LANES * LANES, ahead = OUTS == 1 ? AHEAD / sizeof(Raw) : OUTS * width;
  vector sums[ROWS][OUTS] = {}, here[OUTS];
  for (int64_t k = 0; k < whole; k += LANES) {
    for (int64_t o = 0; o < OUTS; ++o) {
      here[o] = load<T>(weight + o * width + k);
      __builtin_prefetch(weight + o * width + k + ahead);
    }
    for (int64_t r = 0; r < ROWS; ++r) {
      const vector own = load<T>(x + r * width + k);
      for (int64_t o = 0; o < OUTS; ++o) sums[r][o] += own * here[o];
    }
  }
  if (whole < width) {
    for (int64_t o = 0; o < OUTS; ++o) here[o] = rest<T>(weight + o * width + whole, width - whole);
    for (int64_t r = 0; r < ROWS; ++r) {
      const vector own = rest<T>(x + r * width + whole, width - whole);
      for (int64_t o = 0; o < OUTS; ++o) sums[r][o] += own * here[o];
    }
  }
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t o = 0; o < OUTS; ++o) {
      T total = bias == nullptr ? T(0) : T(widen(bias[o]));
      for (int64_t i = 0; i < LANES; ++i) total += sums[r][o][i];
      narrow(total, out + r * stride + o);
    }
}

// The same for any number of rows: three and more share what is read of several rows of the weight.
template <int64_t OUTS, typename T, typename Raw>
void tiles(const Raw* x, const Raw* weight, const Raw* bias, Raw* out, int64_t rows, int64_t width, int64_t stride) {
  for (; rows >= 4; rows -= 4, x += 4 * width, out += 4 * stride)
    tile<4, OUTS, T>(x, weight, bias, out, width, stride);
  if (rows == 3) tile<3, OUTS, T>(x, weight, bias, out, width, stride);
  if (rows == 2) tile<2, OUTS, T>(x, weight, bias, out, width, stride);
  if (rows == 1) tile<1, OUTS, T>(x, weight, bias, out, width, stride);
}

template <typename T, typename Raw>
void multiply(const Raw* x, const Raw* weight, const Raw* bias, Raw* out, int64_t rows, int64_t width, int64_t outs,
              int64_t stride, int64_t threads) {
  constexpr int64_t OUTS = 3;
  const int64_t together = rows < 3 ? 1 : OUTS;
#pragma omp parallel for num_threads(threads)
  for (int64_t task = 0; task < (outs + together - 1) / together; ++task) {
    const int64_t first = task * together;
    if (rows >= 3 && first + OUTS <= outs)
      tiles<OUTS, T>(x, weight + first * width, bias == nullptr ? nullptr : bias + first, out + first, rows, width,
                     stride);
    else
      for (int64_t o = first; o < std::min(first + together, outs); ++o)
        tiles<1, T>(x, weight + o * width, bias == nullptr ? nullptr : bias + o, out + o, rows, width, stride);
  }
}

}  // namespace

// Of the outputs [rows, stride] those from `first` on.
#define FUNCTIONS(NAME, T, RAW)                                                                                   \
  extern "C" void multiply_##NAME(const RAW* x, const RAW* weight, const RAW* bias, RAW* out, int64_t rows,       \
                                  int64_t width, int64_t outs, int64_t first, int64_t stride, int64_t threads) {  \
    multiply<T>(x, weight, bias == nullptr ? nullptr : bias + first, out + first, rows, width, outs, stride,      \
                threads);                                                                                         \
  }

FUNCTIONS(float32, float, float)
FUNCTIONS(float64, double, double)
FUNCTIONS(bfloat16, float, bfloat16)
