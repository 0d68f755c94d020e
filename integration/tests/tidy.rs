//! Rules for the sources: dependencies between crates, imports between modules, file lengths, file names, tests that
//! documents name.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/fault_points.rs"]
mod fault_points;
#[path = "tidy/modules.rs"]
mod modules;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use coracle_integration::repository as root;

/// Packages of this workspace with the names of their dependencies, without dev-dependencies and build dependencies.
fn edges() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut edges = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let dependencies = package["dependencies"].as_array().unwrap().iter();
        let names =
            dependencies.filter(|d| d["kind"].is_null()).map(|d| d["name"].as_str().unwrap().to_owned());
        edges.insert(package["name"].as_str().unwrap().to_owned(), names.collect());
    }
    edges
}

/// Crates of this workspace, and the crates that each may depend on.
const DOWNWARDS: &[(&str, &[&str])] = &[
    ("coracle-proto", &[]),
    ("coracle-nft", &[]),
    (
        "coracle-cni",
        &[
            "coracle-backoff",
            "coracle-error-chain",
            "coracle-fault",
            "coracle-nft",
            "coracle-open-files",
            "coracle-threads",
        ],
    ),
    ("coracle-any-certificate", &[]),
    ("coracle-backoff", &[]),
    ("coracle-cipher-suites", &[]),
    ("coracle-error-chain", &[]),
    ("coracle-fault", &[]),
    ("coracle-open-files", &[]),
    ("coracle-process-metrics", &[]),
    ("coracle-quantity", &[]),
    ("coracle-connections", &[]),
    ("coracle-threads", &[]),
    ("coracle-tree", &[]),
    ("coracle-images", &["coracle-any-certificate", "coracle-error-chain", "coracle-fault", "coracle-tree"]),
    ("coracle-systemd", &[]),
    (
        "coracle-shim",
        &["coracle-error-chain", "coracle-fault", "coracle-proto", "coracle-systemd", "coracle-tree"],
    ),
    ("coracle-nri", &["coracle-open-files", "coracle-proto"]),
    (
        "coracle-cri",
        &[
            "coracle-backoff",
            "coracle-proto",
            "coracle-cni",
            "coracle-connections",
            "coracle-error-chain",
            "coracle-fault",
            "coracle-images",
            "coracle-nri",
            "coracle-open-files",
            "coracle-quantity",
            "coracle-systemd",
            "coracle-threads",
            "coracle-tree",
        ],
    ),
    ("coracle-audit", &[]),
    ("coracle-certificate-subject", &[]),
    ("coracle-sealing", &[]),
    ("coracle-encryption", &["coracle-sealing", "coracle-threads"]),
    ("coracle-token-bucket", &[]),
    ("coracle-token-signer", &[]),
    (
        "coracle-store",
        &["coracle-backoff", "coracle-encryption", "coracle-error-chain", "coracle-fault", "coracle-sealing"],
    ),
    ("coracle-schedule", &[]),
    ("coracle-values", &["coracle-quantity"]),
    ("coracle-services", &["coracle-values"]),
    ("coracle-service-proxy", &["coracle-fault", "coracle-nft", "coracle-services", "coracle-values"]),
    ("coracle-network-policy", &["coracle-fault", "coracle-nft", "coracle-values"]),
    ("coracle-dns", &["coracle-connections", "coracle-services", "coracle-values"]),
    ("coracle-managed-fields", &[]),
    ("coracle-cel", &["coracle-values"]),
    ("coracle-admission-policies", &["coracle-cel"]),
    ("coracle-custom-resources", &["coracle-cel", "coracle-values"]),
    ("coracle-schemas", &["coracle-values"]),
    ("coracle-pod-rules", &["coracle-schemas", "coracle-values"]),
    (
        "coracle-kinds",
        &[
            "coracle-admission-policies",
            "coracle-cel",
            "coracle-custom-resources",
            "coracle-managed-fields",
            "coracle-pod-rules",
            "coracle-schedule",
            "coracle-schemas",
            "coracle-values",
        ],
    ),
    (
        "coracle-apiserver",
        &[
            "coracle-admission-policies",
            "coracle-any-certificate",
            "coracle-audit",
            "coracle-backoff",
            "coracle-cel",
            "coracle-certificate-subject",
            "coracle-connections",
            "coracle-custom-resources",
            "coracle-error-chain",
            "coracle-sealing",
            "coracle-store",
            "coracle-kinds",
            "coracle-managed-fields",
            "coracle-threads",
            "coracle-process-metrics",
            "coracle-token-bucket",
            "coracle-token-signer",
            "coracle-values",
        ],
    ),
    ("coracle-events", &["coracle-backoff", "coracle-token-bucket"]),
    ("coracle-watch", &["coracle-backoff"]),
    ("coracle-scheduler", &["coracle-cel", "coracle-events", "coracle-values", "coracle-watch"]),
    (
        "coracle-controllers",
        &[
            "coracle-backoff",
            "coracle-certificate-subject",
            "coracle-events",
            "coracle-kinds",
            "coracle-schedule",
            "coracle-values",
            "coracle-watch",
        ],
    ),
    (
        "coracle-controlplane",
        &[
            "coracle-backoff",
            "coracle-cipher-suites",
            "coracle-encryption",
            "coracle-sealing",
            "coracle-store",
            "coracle-token-signer",
            "coracle-kinds",
            "coracle-apiserver",
            "coracle-scheduler",
            "coracle-controllers",
        ],
    ),
    (
        "coracle-agent",
        &[
            "coracle-any-certificate",
            "coracle-backoff",
            "coracle-cipher-suites",
            "coracle-proto",
            "coracle-cni",
            "coracle-connections",
            "coracle-cri",
            "coracle-dns",
            "coracle-error-chain",
            "coracle-events",
            "coracle-fault",
            "coracle-images",
            "coracle-nft",
            "coracle-open-files",
            "coracle-pod-rules",
            "coracle-process-metrics",
            "coracle-sealing",
            "coracle-network-policy",
            "coracle-service-proxy",
            "coracle-services",
            "coracle-shim",
            "coracle-systemd",
            "coracle-threads",
            "coracle-token-bucket",
            "coracle-tree",
            "coracle-values",
            "coracle-watch",
            "coracle-controlplane",
        ],
    ),
    ("rust-criu", &[]),
    ("coracle-testing", &[]),
    ("coracle-integration", &["coracle-testing"]),
];

#[test]
fn crates_depend_only_downwards() {
    let edges = edges();
    assert_eq!(edges.len(), DOWNWARDS.len(), "DOWNWARDS does not list every crate");
    for (name, allowed) in DOWNWARDS {
        let ours = edges[*name].iter().filter(|d| d.starts_with("coracle-"));
        let wrong: Vec<_> = ours.filter(|d| !allowed.contains(&d.as_str())).collect();
        assert!(wrong.is_empty(), "{name} must not depend on {wrong:?}");
    }
}

/// Crates without I/O.
const PURE: [&str; 6] = [
    "coracle-quantity",
    "coracle-token-bucket",
    "coracle-values",
    "coracle-schemas",
    "coracle-pod-rules",
    "coracle-kinds",
];

#[test]
fn restricted_libraries_are_used_only_by_their_owners() {
    let only: &[(&str, &[&str])] = &[
        ("libcontainer", &["coracle-shim"]),
        (
            "kube",
            &[
                "coracle-agent",
                "coracle-events",
                "coracle-watch",
                "coracle-controllers",
                "coracle-scheduler",
                "coracle-controlplane",
            ],
        ),
        ("fjall", &["coracle-store"]),
        ("rtnetlink", &["coracle-cni"]),
        ("anyhow", &["coracle-agent"]),
    ];
    for (library, owners) in only {
        for (name, dependencies) in edges() {
            assert!(
                !dependencies.contains(*library) || owners.contains(&name.as_str()),
                "{name} must not use {library}"
            );
        }
    }
    let shim = &edges()["coracle-shim"];
    for threaded in ["tokio", "tonic", "hyper", "rayon"] {
        assert!(!shim.contains(threaded), "the shim forks: it must not use {threaded}");
    }
    for pure in PURE {
        let dependencies = &edges()[pure];
        for effect in ["tokio", "futures", "kube", "hyper", "nix", "libc", "rand", "tracing"] {
            assert!(!dependencies.contains(effect), "{pure} is pure: it must not use {effect}");
        }
    }
}

/// All crates of the workspace on which the node alone depends, directly or not.
fn crates_of_the_node() -> BTreeSet<String> {
    let edges = edges();
    let (mut found, mut left) = (BTreeSet::new(), vec!["coracle-agent".to_owned()]);
    while let Some(name) = left.pop() {
        // The control plane is an optional dependency of the agent.
        if name == "coracle-controlplane" || !edges.contains_key(&name) || !found.insert(name.clone()) {
            continue;
        }
        left.extend(edges[&name].iter().cloned());
    }
    found
}

/// The node alone needs the rules of pods. The rules of all kinds would bring CEL with its parser.
#[test]
fn the_node_depends_on_the_rules_of_pods_only() {
    let crates = crates_of_the_node();
    assert!(crates.contains("coracle-pod-rules"));
    for other in [
        "coracle-kinds",
        "coracle-cel",
        "coracle-custom-resources",
        "coracle-managed-fields",
        "coracle-schedule",
        "coracle-encryption",
    ] {
        assert!(!crates.contains(other), "the node alone must not depend on {other}");
    }
}

#[test]
fn dependencies_come_from_the_registry_and_have_allowed_licences() {
    let allowed = [
        "MIT",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "ISC",
        "Zlib",
        "Unicode-3.0",
        "MPL-2.0",
        "CC0-1.0",
        "Unlicense",
        "0BSD",
        "BSL-1.0",
        "MIT-0",
        "CDLA-Permissive-2.0",
        "Apache-2.0 WITH LLVM-exception",
    ];
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--offline",
            "--locked",
            "--filter-platform=x86_64-unknown-linux-musl",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    for package in metadata["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        if let Some(source) = package["source"].as_str() {
            assert!(source.starts_with("registry+"), "{name} comes from {source}");
        }
        let licence = package["license"].as_str().unwrap_or("").replace('/', " OR ").replace(['(', ')'], " ");
        // Each operand of AND must have an allowed alternative (OR).
        let fits =
            licence.split(" AND ").all(|part| part.split(" OR ").any(|one| allowed.contains(&one.trim())));
        assert!(fits, "{name} is under {licence:?}");
    }
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

fn all_sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    sources(root(), &mut found);
    assert!(found.len() > 100);
    found
}

/// The number of lines before the inline test module. A declaration such as `mod tests;` does not end the count.
fn lines_before_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_module = |line: &&str| line.starts_with("mod ") && line.ends_with('{');
    let begins = |at: &usize| {
        let mut rest = lines[*at..].iter().skip_while(|line| line.starts_with("#["));
        lines[*at] == "#[cfg(test)]" && rest.next().is_some_and(is_module)
    };
    (0..lines.len()).find(begins).unwrap_or(lines.len())
}

#[test]
fn the_lines_of_a_file_end_at_its_inline_tests() {
    let declared = "//! A.\n#[cfg(test)]\nmod tests;\nfn a() {}\n";
    assert_eq!(lines_before_tests(declared), 4);
    let inline = "#[cfg(test)]\n#[allow(clippy::panic)]\nmod tests {\n}\n";
    assert_eq!(lines_before_tests(&format!("{declared}{inline}")), 4);
}

#[test]
fn a_file_has_at_most_500_lines_before_its_tests_and_module_documentation() {
    for path in all_sources() {
        let text = fs::read_to_string(&path).unwrap();
        let lines = lines_before_tests(&text);
        let is_test = path.components().any(|c| c.as_os_str() == "tests") || path.ends_with("tests.rs");
        assert!(is_test || lines <= 500, "{} has {lines} lines", path.display());
        assert!(is_test || text.starts_with("//!"), "{} has no module documentation", path.display());
    }
}

#[test]
fn no_file_has_a_generic_name() {
    for path in all_sources() {
        let stem = path.file_stem().unwrap().to_str().unwrap();
        let drawer = ["mod", "utils", "util", "common", "helpers", "helper", "misc", "manager", "constants"];
        assert!(!drawer.contains(&stem), "{} needs a name that describes its content", path.display());
    }
}

#[test]
fn plans_are_pure() {
    for path in all_sources().iter().filter(|p| p.ends_with("plan.rs")) {
        let text = fs::read_to_string(path).unwrap();
        let code = text.split("#[cfg(test)]").next().unwrap();
        for effect in
            ["tokio::", "std::fs", "std::process", "Instant::now", "SystemTime::now", "Timestamp::now"]
        {
            assert!(!code.contains(effect), "{} uses {effect}: a plan only decides", path.display());
        }
    }
}

/// `thread::spawn` and `Scope::spawn` panic if the kernel refuses a thread, and a panic ends the node.
#[test]
fn a_refused_thread_is_handled() {
    let parts = ["agent", "cri", "cni", "controlplane", "proto"];
    for path in all_sources() {
        let inside = path.strip_prefix(root()).unwrap();
        let is_product = parts.iter().any(|part| inside.starts_with(part));
        let has_tests = |c: std::path::Component<'_>| c.as_os_str() == "tests" || c.as_os_str() == "benches";
        let is_test = inside.components().any(has_tests) || inside.to_str().unwrap().ends_with("tests.rs");
        if !is_product || is_test {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap();
        for panics in ["thread::spawn(", "scope.spawn("] {
            assert!(!code.contains(panics), "{} uses {panics}: use thread::Builder", inside.display());
        }
    }
}

/// Signals are sent by pidfd, because another process can have the pid when the signal is sent. The exception is the
/// process group of a child: its number is not reused before the parent has waited for the child.
#[test]
fn signals_are_sent_by_descriptor() {
    let parts = ["agent", "cri", "cni", "controlplane"];
    let exceptions = [Path::new("cni/src/process_group.rs")];
    let calls = ["signal::kill(", "libc::kill(", "kill_process(", "killpg(", "tkill(", "tgkill(", "SYS_kill"];
    let by_pid = |line: &str| {
        let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        let is_import = line.contains("sys::signal::") && words.any(|word| word == "kill");
        is_import || calls.iter().any(|call| line.contains(call))
    };
    for line in ["use nix::sys::signal::{Signal, kill};", "libc::tgkill(group, id, signal)"] {
        assert!(by_pid(line), "{line}");
    }
    assert!(!by_pid("use nix::sys::signal::Signal;") && !by_pid("self.killer.kill(container)"));
    for path in all_sources() {
        let inside = path.strip_prefix(root()).unwrap();
        let is_product = parts.iter().any(|part| inside.starts_with(part));
        let is_test = inside.components().any(|c| c.as_os_str() == "tests" || c.as_os_str() == "benches")
            || inside.to_str().unwrap().ends_with("tests.rs");
        if !is_product || is_test || exceptions.contains(&inside) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.lines().take(lines_before_tests(&text)).filter(|line| !line.trim().starts_with("//"));
        let found: Vec<&str> = code.filter(|line| by_pid(line)).collect();
        assert_eq!(found, Vec::<&str>::new(), "{} sends a signal to a pid", inside.display());
    }
}

/// Names of tests in the last column of a table's row: words in backquotes with an underscore, and no slash, dot or space.
fn tests_in_row(row: &str) -> Vec<String> {
    let words = last_cell(row).split('`').skip(1).step_by(2);
    let names = words.map(|word| word.trim_start_matches("hostile: ").to_owned());
    names.filter(|name| name.contains('_') && !name.contains(['/', '.', ' '])).collect()
}

fn last_cell(row: &str) -> &str {
    let cells = row.trim_end().strip_suffix('|').unwrap_or(row);
    cells.rsplit('|').next().unwrap_or_default()
}

/// Names of tests in the tables of a document.
fn tests_named_in(document: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(document)).unwrap();
    text.lines().filter(|line| line.starts_with("| ")).flat_map(tests_in_row).collect()
}

/// Whether the last column of a row names an existing fuzz target.
fn names_fuzz_target(row: &str) -> bool {
    let name = last_cell(row).split_once("fuzz target `").and_then(|(_, rest)| rest.split('`').next());
    name.is_some_and(|name| root().join(format!("integration/fuzz/fuzz_targets/{name}.rs")).exists())
}

/// `every_test_that_a_document_names_exists` checks that the tests exist.
#[test]
fn every_limit_names_its_test() {
    let text = fs::read_to_string(root().join("docs/limits.md")).unwrap();
    let is_without = |row: &&str| tests_in_row(row).is_empty() && !names_fuzz_target(row);
    for row in
        ["| a | 1 | `a_b` | |", "| a | 1 | b | tests of `c/d_e` |", "| a | 1 | b | fuzz target `absent` |"]
    {
        assert!(is_without(&row), "{row}");
    }
    let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| what |"));
    assert_eq!(rows.filter(is_without).collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn every_test_that_a_document_names_exists() {
    let sources: Vec<String> = all_sources().iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    for document in ["docs/security.md", "docs/limits.md"] {
        let named = tests_named_in(document);
        assert!(!named.is_empty(), "{document} names no test");
        let missing: Vec<_> = named
            .iter()
            .filter(|name| !sources.iter().any(|source| source.contains(&format!("fn {name}("))))
            .collect();
        assert_eq!(missing, Vec::<&String>::new(), "{document}");
    }
}
