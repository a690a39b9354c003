// The processor time of one thread by label. Python and torch's operations push and pop labels; time counts for the
// label on top. A node of the backward pass has the label of the operation that made it.
#include <ATen/record_function.h>
#include <time.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <vector>

namespace {
std::vector<double> spent(4096);
std::vector<int> stack{0};
std::unordered_map<std::string, int> kinds;  // of operations
std::unordered_map<int64_t, int> made;       // by sequence number, the label of an operation
int base = 0, engine = 0;                    // the number of kinds, the kind of the engine of autograd
double last = 0;
at::CallbackHandle handle = 0;

double now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}
void charge() {
  const double t = now();
  spent[stack.back()] += t - last;
  last = t;
}
void enter(int label) {
  charge();
  stack.push_back(label);
}
struct Pushed : at::ObserverContext {};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& fn) {
  const int top = stack.back(), stage = top / base * base, kind = top % base;
  const std::string name = fn.name();
  if (fn.scope() == at::RecordScope::USER_SCOPE) {
    const auto named = kinds.find(name);
    if (named == kinds.end()) return nullptr;
    enter(named->second * base);
    return std::make_unique<Pushed>();
  }
  if (name.rfind("autograd::engine", 0) == 0) {
    enter(stage + engine);
    return std::make_unique<Pushed>();
  }
  if (fn.scope() == at::RecordScope::BACKWARD_FUNCTION) {
    const auto found = made.find(fn.seqNr());
    enter(stage + (found == made.end() ? engine : found->second % base));
    return std::make_unique<Pushed>();
  }
  const auto known = kinds.find(name);
  if (known != kinds.end() && (kind <= engine || known->second == 2)) {
    enter(stage + known->second);
  } else if (kind == 0 && fn.scope() == at::RecordScope::FUNCTION) {
    enter(stage + 1);
  } else {
    if (fn.seqNr() >= 0) made[fn.seqNr()] = top;
    return nullptr;
  }
  if (fn.seqNr() >= 0) made[fn.seqNr()] = stack.back();
  return std::make_unique<Pushed>();
}
void end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  charge();
  stack.pop_back();
}
}  // namespace

// kind 0: Python; 1: torch's operations without a kind; 2: products; `engine_kind`: 3
extern "C" void observe(int count) {
  base = count, engine = 3;
  std::fill(spent.begin(), spent.end(), 0.0);
  handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begin, end).scopes(
      {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION, at::RecordScope::USER_SCOPE}));
  last = now();
}
extern "C" void stop() { charge(), at::removeCallback(handle); }
extern "C" void name_kind(const char* name, int kind) { kinds[name] = kind; }
extern "C" void push(int label) { enter(label); }
extern "C" void pop() { charge(), stack.pop_back(); }
extern "C" int top() { return stack.back(); }
extern "C" double take(int label) {
  const double x = spent[label];
  spent[label] = 0;
  return x;
}
