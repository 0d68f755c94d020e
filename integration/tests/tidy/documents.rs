//! Rules for the documents: length of the README, links, paths. `agent/src/role/command_line/documents.rs` checks the
//! flags and subcommands that they mention.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use super::{all_sources, root};

/// Folders of this repository. Documents name files in them by the path from the root.
const FOLDERS: [&str; 9] =
    ["agent", "cni", "controlplane", "cri", "docs", "examples", "integration", "proto", "scripts"];

/// A document as lines of text. Lines of fenced code blocks are empty.
struct Document {
    path: PathBuf,
    prose: Vec<String>,
}

// === impl Document ===

impl Document {
    fn read(path: PathBuf) -> Self {
        let mut fenced = false;
        let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let prose = text.lines().map(|line| {
            let is_fence = line.trim_start().starts_with("```");
            fenced ^= is_fence;
            if fenced || is_fence { String::new() } else { line.to_owned() }
        });
        Self { prose: prose.collect(), path }
    }

    /// Targets of links in the form `[text](target)`, outside of code spans.
    fn links(&self) -> Vec<String> {
        let mut links = Vec::new();
        for line in &self.prose {
            let text: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
            links.extend(
                text.split("](")
                    .skip(1)
                    .filter_map(|rest| rest.split_once(')'))
                    .map(|(target, _)| target.to_owned()),
            );
        }
        links
    }

    /// The anchors of the headings, as GitHub generates them.
    fn anchors(&self) -> Vec<String> {
        let mut seen: BTreeMap<String, usize> = BTreeMap::new();
        let headings = self.prose.iter().filter(|line| line.starts_with('#'));
        let texts = headings.map(|line| line.trim_start_matches('#').trim());
        texts
            .map(|text| {
                let anchor = anchor(text);
                let count = seen.entry(anchor.clone()).or_default();
                *count += 1;
                if *count == 1 { anchor } else { format!("{anchor}-{}", *count - 1) }
            })
            .collect()
    }

    /// Words in code spans that look like paths of this repository.
    fn paths(&self) -> Vec<String> {
        let spans = self.prose.iter().flat_map(|line| line.split('`').skip(1).step_by(2));
        let words =
            spans.flat_map(str::split_whitespace).map(|word| word.trim_end_matches([',', ';', ':', '.']));
        let is_path = |word: &&str| {
            let (folder, rest) = word.split_once('/').unwrap_or_default();
            FOLDERS.contains(&folder) && !rest.contains(['*', '{', '<', '…', '$'])
        };
        words.filter(is_path).map(str::to_owned).collect()
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect::<String>().to_lowercase()
}

fn documents() -> Vec<Document> {
    paths().into_iter().map(Document::read).collect()
}

fn paths() -> Vec<PathBuf> {
    let mut paths =
        vec![root().join("README.md"), root().join("ARCHITECTURE.md"), root().join("examples/README.md")];
    for folder in ["docs", "docs/decisions", ".github"] {
        let entries = fs::read_dir(root().join(folder)).unwrap().map(|entry| entry.unwrap().path());
        paths.extend(entries.filter(|path| path.extension().is_some_and(|extension| extension == "md")));
    }
    assert!(paths.len() > 20, "{paths:?}");
    paths
}

/// Programs whose command lines documents show.
const PROGRAMS: [&str; 7] = ["apt", "coracle", "helm", "kubectl", "rc-service", "sudo", "systemctl"];

fn is_command(line: &str) -> bool {
    let word = line.trim_start_matches("$ ").split_whitespace().next().unwrap_or_default();
    PROGRAMS.contains(&word) || word.starts_with("scripts/")
}

/// First lines of blocks that `integration/documents/run` runs.
const RUN: [&str; 4] = ["sh run", "sh run cluster", "sh run docker", "sh run tarball"];

/// Whether the first line of a block of commands says that a test runs it, or why no test does.
fn is_marked(first: &str) -> bool {
    let reason = first.strip_prefix("sh not run: ").unwrap_or_default();
    RUN.contains(&first) || !reason.is_empty()
}

/// The first lines of all fenced blocks, without the fence.
fn first_lines(text: &str) -> Vec<&str> {
    let fences = text.lines().filter_map(|line| line.trim_start().strip_prefix("```"));
    fences.step_by(2).collect()
}

/// Whether the reason names a file of the repository or a test of these sources, and no file that does not exist.
fn names_what_runs_it(reason: &str, sources: &[String]) -> bool {
    let words = || {
        let words = reason.split_whitespace().map(|word| word.trim_start_matches('`'));
        words.map(|word| word.trim_end_matches(['`', ',', ';', '.', ':']))
    };
    let paths: Vec<&str> = words().filter(|word| word.contains('/')).collect();
    let is_test = |word: &str| {
        let declaration = format!("fn {word}(");
        word.contains('_') && sources.iter().any(|source| source.contains(&declaration))
    };
    paths.iter().all(|path| root().join(path).is_file()) && (!paths.is_empty() || words().any(is_test))
}

/// Blocks without a mark, and commands that are in no block of the language `sh`.
fn unmarked_commands(text: &str) -> Vec<String> {
    let (mut unmarked, mut block) = (Vec::new(), None);
    for line in text.lines() {
        let content = line.trim_start();
        if let Some(first) = content.strip_prefix("```") {
            if block.is_none() && first.starts_with("sh") && !is_marked(first) {
                unmarked.push(content.to_owned());
            }
            block = if block.is_none() { Some(first) } else { None };
            continue;
        }
        let may_have_commands = match block {
            Some(first) => first.starts_with("sh") || first == "text",
            None => !line.starts_with("    "),
        };
        if !may_have_commands && is_command(content) {
            unmarked.push(content.to_owned());
        }
    }
    unmarked
}

/// The path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            other => plain.push(other),
        }
    }
    plain
}

#[test]
fn the_readme_has_at_most_150_lines() {
    let lines = fs::read_to_string(root().join("README.md")).unwrap().lines().count();
    assert!(lines <= 150, "README.md has {lines} lines: move details to docs/");
}

#[test]
fn the_readme_links_every_page() {
    let readme = Document::read(root().join("README.md")).links();
    for document in documents() {
        let name = document.path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        let in_a_listed_folder =
            ["docs/decisions/", "examples/"].iter().any(|folder| name.starts_with(folder));
        assert!(
            name == "README.md" || in_a_listed_folder || readme.contains(&name),
            "README.md does not link {name}"
        );
    }
}

#[test]
fn the_index_of_decisions_lists_every_file() {
    let folder = root().join("docs/decisions");
    let listed = Document::read(folder.join("README.md")).links();
    let entries =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let unlisted: Vec<String> =
        entries.filter(|name| name != "README.md" && !listed.contains(name)).collect();
    assert_eq!(unlisted, Vec::<String>::new());
}

#[test]
fn links_lead_to_files_and_headings_that_exist() {
    let documents = documents();
    let mut wrong = Vec::new();
    let mut count = 0;
    for document in &documents {
        for link in document.links().into_iter().filter(|link| !link.contains("://")) {
            count += 1;
            let (file, heading) = link.split_once('#').unwrap_or((&link, ""));
            let path = match file {
                "" => document.path.clone(),
                file => plain(&document.path.parent().unwrap().join(file)),
            };
            let has_heading = || {
                let target = documents.iter().find(|other| other.path == path);
                target.is_some_and(|target| target.anchors().iter().any(|anchor| anchor == heading))
            };
            if !path.exists() || !(heading.is_empty() || has_heading()) {
                wrong.push(format!("{}: {link}", document.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "broken links:\n{}", wrong.join("\n"));
    assert!(count > 50, "{count} links");
}

#[test]
fn paths_that_documents_name_exist() {
    let mut wrong = Vec::new();
    for document in documents() {
        for word in document.paths() {
            let path = root().join(&word);
            let module = root().join(format!("{}.rs", word.trim_end_matches('/')));
            if !path.exists() && !module.exists() {
                wrong.push(format!("{}: {word}", document.path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "paths that do not exist:\n{}", wrong.join("\n"));
}

/// Scripts that other scripts call; documents name them, but users do not start them.
const PARTS: [&str; 5] = ["critest-images", "cross", "kubelet", "rust-std", "vm"];

#[test]
fn scripts_that_documents_name_explain_themselves() {
    let mut wrong = BTreeSet::new();
    let mut count = 0;
    for name in documents()
        .iter()
        .flat_map(Document::paths)
        .filter_map(|path| path.strip_prefix("scripts/").map(str::to_owned))
    {
        let Ok(text) = fs::read_to_string(root().join("scripts").join(&name)) else { continue };
        if text.starts_with("#!/bin/bash") && !PARTS.contains(&name.as_str()) {
            count += 1;
            if !text.contains("--help") {
                wrong.insert(name);
            }
        }
    }
    assert!(wrong.is_empty(), "scripts that do not answer `--help`: {wrong:?}");
    assert!(count > 20, "{count} scripts");
}

/// `integration/tests/cluster/documents.rs` runs the blocks.
#[test]
fn a_block_of_commands_is_run_or_says_why_not() {
    let mut wrong = Vec::new();
    for path in paths() {
        let unmarked = unmarked_commands(&fs::read_to_string(&path).unwrap());
        wrong.extend(unmarked.into_iter().map(|line| format!("{}: {line}", path.display())));
    }
    let rule = format!("begin a block of commands with one of {RUN:?}, or with sh not run: REASON");
    assert!(wrong.is_empty(), "{rule}:\n{}", wrong.join("\n"));
}

#[test]
fn a_block_that_is_not_run_names_what_runs_it_instead() {
    let sources: Vec<String> = all_sources().iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    for reason in
        ["slow", "scripts/absent runs it", "scripts/test runs scripts/absent", "see a_test_that_is_absent"]
    {
        assert!(!names_what_runs_it(reason, &sources), "{reason}");
    }
    for reason in [".ci/run runs `scripts/test`, too", "see anchors_are_those_of_github"] {
        assert!(names_what_runs_it(reason, &sources), "{reason}");
    }
    let mut wrong = Vec::new();
    for path in paths() {
        let text = fs::read_to_string(&path).unwrap();
        let reasons = first_lines(&text).into_iter().filter_map(|first| first.strip_prefix("sh not run: "));
        wrong.extend(
            reasons
                .filter(|reason| !names_what_runs_it(reason, &sources))
                .map(|reason| format!("{}: {reason}", path.display())),
        );
    }
    let rule = "a reason names the test or the script that runs the commands or checks them";
    assert!(wrong.is_empty(), "{rule}:\n{}", wrong.join("\n"));
}

/// `integration/tests/cluster/documents.rs` reads only these pages.
#[test]
fn blocks_that_are_run_are_on_pages_that_the_test_reads() {
    let is_read = |path: &Path| {
        path == root().join("README.md") || path.parent() == Some(root().join("docs").as_path())
    };
    let has_run = |path: &Path| {
        let text = fs::read_to_string(path).unwrap();
        first_lines(&text).iter().any(|first| RUN.contains(first))
    };
    let (read, others): (Vec<PathBuf>, Vec<PathBuf>) = paths().into_iter().partition(|path| is_read(path));
    let wrong: Vec<PathBuf> = others.into_iter().filter(|path| has_run(path)).collect();
    assert_eq!(wrong, Vec::<PathBuf>::new(), "no test runs the blocks of these pages");
    assert!(read.iter().any(|path| has_run(path)));
}

#[test]
fn commands_without_a_mark_are_found() {
    let marked = "```sh run\ncoracle check\n```\n   ```sh not run: slow\n   scripts/test\n   ```\n\
                  ```text\ncoracle agent\n```\nkubectl shows it\n    a list that continues\n";
    assert_eq!(unmarked_commands(marked), Vec::<String>::new());
    for unmarked in [
        "```sh\n```",
        "```sh not run: \n```",
        "```\n$ coracle up\n```",
        "    scripts/test",
        "```yaml\nkubectl\n```",
    ] {
        assert_eq!(unmarked_commands(unmarked).len(), 1, "{unmarked}");
    }
}

#[test]
fn anchors_are_those_of_github() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("page.md");
    fs::write(&path, "# The kubelet's file\n```\n# no heading\n[no](link)\n```\n## CRI-O, `x_y`\n## Twice\n## Twice\n[a](b.md#c) `[no](link)`\n").unwrap();
    let document = Document::read(path);
    assert_eq!(document.anchors(), ["the-kubelets-file", "cri-o-x_y", "twice", "twice-1"]);
    assert_eq!(document.links(), ["b.md#c"]);
}
