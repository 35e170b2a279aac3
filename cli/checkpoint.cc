// pannier checkpoint: looks at checkpoints, compares and removes them, and makes models of them.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "cli/checkpoint_diff.h"
#include "cli/commands.h"
#include "pannier/base/error.h"
#include "pannier/base/units.h"
#include "pannier/ckpt/checkpoint_folder.h"
#include "pannier/ckpt/checkpoint_reader.h"
#include "pannier/ckpt/model_export.h"

namespace pannier::cli {
namespace {

/// What the subcommands are given.
struct Arguments {
  std::string folder, other, tag, other_tag, dtype = "bf16", max_shard_size = "5GB";
  int keep = 1;
};
using Shared = std::shared_ptr<Arguments>;

std::string chosen_tag(const std::string& folder, const std::string& tag) {
  const auto found = tag.empty() ? ckpt::CheckpointFolder(folder).latest() : std::optional(tag);
  if (!found) {
    throw ConfigError(fmt::format("'{}' has no file 'latest'; say which checkpoint with --tag", folder));
  }
  return *found;
}

ckpt::CheckpointReader open(const std::string& folder, const std::string& tag) {
  return ckpt::CheckpointReader(ckpt::SealedFolder(folder).folder(chosen_tag(folder, tag)));
}

void list(const Arguments& given) {
  const ckpt::CheckpointFolder folder(given.folder);
  const auto latest = folder.latest();
  fmt::print("{:<28} {:>10} {:>12}\n", "tag", "step", "size");
  for (const auto& tag : folder.tags()) {
    fmt::print("{:<28} {:>10} {:>12}{}{}\n", tag.tag, tag.step, format_bytes(tag.nbytes),
               latest == tag.tag ? "  latest" : "",
               tag.is_complete() ? "" : fmt::format("  not complete: {}", tag.problem));
  }
}

void show(const Arguments& given) {
  const auto reader = open(given.folder, given.tag);
  const ckpt::Manifest& manifest = reader.manifest();
  fmt::print("{}: step {}, {} ranks, {} files\n", reader.path(), manifest.step, manifest.world_size,
             manifest.files.size());
  for (const auto& [key, value] : manifest.attributes) {
    fmt::print("  {} = {}\n", key, value);
  }
  for (const auto& tensor : manifest.tensors) {
    fmt::print("  {} {} {}\n", tensor.name, ckpt::dtype_name(tensor.dtype), tensor.shape);
  }
}

void verify(const Arguments& given) {
  const std::string tag = chosen_tag(given.folder, given.tag);
  const auto problems = ckpt::CheckpointFolder(given.folder).verify(tag);
  if (problems.empty()) {
    fmt::print("{}/{}: every byte is as it was written\n", given.folder, tag);
    return;
  }
  throw IoError(fmt::format("{}", fmt::join(problems, "\n")), EBADMSG);
}

void prune(const Arguments& given) {
  for (const auto& tag : ckpt::CheckpointFolder(given.folder).prune(given.keep)) {
    fmt::print("removed {}\n", tag);
  }
}

void consolidate(const Arguments& given) {
  auto reader = open(given.folder, given.tag);
  const ckpt::ModelExportOptions options{.max_shard_nbytes = ckpt::parse_size(given.max_shard_size)};
  for (const auto& file : ckpt::consolidate(reader, given.other, ckpt::export_dtype(given.dtype), options)) {
    fmt::print("{}/{}\n", given.other, file);
  }
}

void diff(const Arguments& given) {
  auto first = open(given.folder, given.tag);
  auto second = open(given.other.empty() ? given.folder : given.other, given.other_tag);
  if (!print_differences(first, second)) {
    fmt::print("no difference\n");
  }
}

// DeepSpeed's files are pickles, which Python reads.
void import(const Arguments& given) {
  std::vector<std::string> words{"python3", "-m", "pannier.deepspeed_import", given.folder, given.other};
  if (!given.tag.empty()) {
    words.insert(words.end(), {"--tag", given.tag});
  }
  std::vector<char*> arguments;
  for (auto& word : words) {
    arguments.push_back(word.data());
  }
  arguments.push_back(nullptr);
  ::execvp(arguments.front(), arguments.data());
  throw IoError("start python3", errno);
}

template <class Body>
CLI::App* add(CLI::App& parent, const Shared& given, const char* name, const char* what, Body body) {
  CLI::App* command = parent.add_subcommand(name, what);
  command->add_option("folder", given->folder, "The folder that holds `latest` and the tags")->required();
  command->callback([given, body] { body(*given); });
  return command;
}

}  // namespace

void add_checkpoint(CLI::App& app) {
  CLI::App* parent = app.add_subcommand("checkpoint", "Look at checkpoints, compare, remove, export and import them");
  parent->require_subcommand(1);
  const auto given = std::make_shared<Arguments>();
  const auto tag = [&](CLI::App* command) {
    command->add_option("--tag", given->tag, "The checkpoint; default: the latest");
  };
  add(*parent, given, "list", "List the checkpoints of a folder", list);
  tag(add(*parent, given, "show", "Print what a checkpoint holds", show));
  tag(add(*parent, given, "verify", "Read every byte of a checkpoint", verify));
  add(*parent, given, "prune", "Remove old checkpoints; the latest stays in any case", prune)
      ->add_option("--keep", given->keep, "How many of the newest stay")
      ->required();
  CLI::App* compared = add(*parent, given, "diff", "Say in what two checkpoints differ", diff);
  tag(compared);
  compared->add_option("--other", given->other, "The other one's folder; default: the same");
  compared->add_option("--other-tag", given->other_tag, "The other checkpoint; default: the latest");
  CLI::App* exported = add(*parent, given, "consolidate", "Make a Hugging Face model of a checkpoint", consolidate);
  tag(exported);
  exported->add_option("out", given->other, "Where to write the model")->required();
  exported->add_option("--dtype", given->dtype, "Of the parameters")->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  exported->add_option("--max-shard-size", given->max_shard_size, "Of one file, such as 5GB");
  CLI::App* imported = add(*parent, given, "import", "Make a checkpoint of one of DeepSpeed's", import);
  tag(imported);
  imported->add_option("out", given->other, "The folder to save into")->required();
}

}  // namespace pannier::cli
