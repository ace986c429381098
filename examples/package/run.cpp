// Runs a package without Python: torch's loader and libtorch are all that it needs.
//
//     ./build.sh run && ./run model.pt2

#include <cstdio>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

int main(int count, char **words) {
  if (count != 2) {
    std::fprintf(stderr, "usage: %s model.pt2\n", words[0]);
    return 2;
  }
  c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader model(words[1]);
  std::vector<at::Tensor> inputs = {at::linspace(-1, 1, 2 * 11 * 16).reshape({2, 11, 16})};
  std::vector<at::Tensor> outputs = model.run(inputs);
  std::printf("%.4f\n", outputs[0].square().sum().item<double>());
  return 0;
}
