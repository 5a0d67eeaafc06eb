// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/tensor/dims.h"

namespace bytecheckpoint::engine {

/// What the name of a file of DeepSpeed says: `[bf16_]zero_pp_rank_R_mp_rank_M_optim_states.pt`,
/// `zero_pp_rank_R_mp_rank_M_model_states.pt`, or `mp_rank_M_model_states.pt`, which counts as that of rank 0.
struct ZeroFile {
  bool is_of_optimizer = false;
  int rank = 0;
  int model_rank = 0;  // of tensor and pipeline parallelism
};
std::optional<ZeroFile> parse_zero_file(std::string_view name);
/// Whether a file has a layer of a pipeline (`layer_00-model_00-model_states.pt`), or experts or their optimizer
/// (`layer_0_expert_0_mp_rank_00_model_states.pt`, `expp_rank_0_mp_rank_00_optim_states.pt`).
bool is_of_layer_or_expert(std::string_view name);

/// Whether a name begins with one of several texts.
bool begins_with_one(std::string_view name, std::initializer_list<std::string_view> begins);

/// The part of a flat tensor that is of one parameter.
struct Fragment {
  int64_t numel = 0;
  int64_t start = 0;
};

/// Each of these reads the pickle of one value, of which nothing is run. \returns false if it is anything else.
bool read_size(std::string_view pickle, tensor::Dims* out);            // a torch.Size
bool read_fragment(std::string_view pickle, Fragment* out);            // DeepSpeed's fragment_address
bool read_text(std::string_view pickle, std::string* out);             // a str
bool read_counts(std::string_view pickle, std::vector<int64_t>* out);  // an int, or a list of them

}  // namespace bytecheckpoint::engine
