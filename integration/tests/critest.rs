//! The published critest against the runtime alone and inside an agent. The number of specs that pass, fail and skip
//! must be those of the table in docs/conformance.md.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::process::{Command, Stdio};

use coracle_integration::{Machine, repository};
use serde_json::Value;

/// Numbers of specs in a group that passed, failed and were skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Outcome {
    passed: usize,
    failed: usize,
    skipped: usize,
}

type Groups = BTreeMap<String, Outcome>;

/// Runs all of critest. Returns the specs of ginkgo's report.
fn critest(role: &str) -> Vec<Value> {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report.json");
    let output = Command::new(repository().join("scripts/critest"))
        .args(["run", role])
        .env("CORACLE", Machine::coracle())
        .env("REPORT", &report)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let text = std::fs::read(&report)
        .unwrap_or_else(|_| panic!("no report: {}{}", printed(&output.stdout), printed(&output.stderr)));
    let mut suites: Value = serde_json::from_slice(&text).unwrap();
    let Value::Array(specs) = suites[0]["SpecReports"].take() else { panic!("no specs in the report") };
    // Specs that a filter excludes (the benchmarks) are also "skipped", but without a reason.
    let ran = |spec: &Value| {
        spec["LeafNodeType"] == "It" && (spec["State"] != "skipped" || !spec["Failure"].is_null())
    };
    specs.into_iter().filter(ran).collect()
}

fn texts(spec: &Value) -> Vec<&str> {
    spec["ContainerHierarchyTexts"].as_array().unwrap().iter().filter_map(Value::as_str).collect()
}

/// The group of a spec in the table: its outermost text without tags. The group "Security Context" is divided by the
/// next text.
fn group(spec: &Value) -> String {
    let plain = |text: &str| {
        let words = text.split_whitespace().filter(|word| !word.starts_with('['));
        words.collect::<Vec<_>>().join(" ")
    };
    match texts(spec).as_slice() {
        [first, second, ..] if plain(first) == "Security Context" => {
            format!("{}: {}", plain(first), plain(second))
        }
        [first, ..] => plain(first),
        [] => String::new(),
    }
}

fn groups(specs: &[Value]) -> Groups {
    let mut groups = Groups::new();
    for spec in specs {
        let outcome = groups.entry(group(spec)).or_default();
        match spec["State"].as_str().unwrap() {
            "passed" => outcome.passed += 1,
            "skipped" => outcome.skipped += 1,
            _ => outcome.failed += 1,
        }
    }
    groups
}

/// The table of the section critest: group, specs, pass, fail, skip, why.
fn table(page: &str) -> Groups {
    let section = page.split("\n## ").find(|s| s.starts_with("critest\n")).expect("a section critest");
    let mut groups = Groups::new();
    for line in section.lines().filter(|line| line.starts_with("| ")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [name, specs, passed, failed, skipped, why] = cells.as_slice() else {
            panic!("not six cells: {line}")
        };
        let Ok(specs) = specs.parse::<usize>() else { continue };
        let number = |cell: &str| cell.parse::<usize>().unwrap_or_else(|_| panic!("no number: {line}"));
        let outcome = Outcome { passed: number(passed), failed: number(failed), skipped: number(skipped) };
        assert_eq!(specs, outcome.passed + outcome.failed + outcome.skipped, "does not add up: {line}");
        let complete = outcome.passed == specs || *name == "total";
        assert!(complete || !why.is_empty(), "gives no reason: {line}");
        groups.insert((*name).to_owned(), outcome);
    }
    let total = groups.remove("total").expect("a row for the total");
    let sum = groups.values().fold(Outcome::default(), |a, b| Outcome {
        passed: a.passed + b.passed,
        failed: a.failed + b.failed,
        skipped: a.skipped + b.skipped,
    });
    assert_eq!(total, sum, "the total is not the sum");
    groups
}

/// The specs that did not pass, with their messages.
fn account(specs: &[Value]) -> String {
    let mut text = String::new();
    for spec in specs.iter().filter(|spec| spec["State"] != "passed") {
        let message: String =
            spec["Failure"]["Message"].as_str().unwrap_or_default().chars().take(400).collect();
        let state = spec["State"].as_str().unwrap();
        let leaf = spec["LeafNodeText"].as_str().unwrap();
        writeln!(text, "{state}: {} > {leaf}: {message}", texts(spec).join(" > ")).unwrap();
    }
    text
}

fn conforms_as_documented(role: &str) {
    let expected = table(&std::fs::read_to_string(repository().join("docs/conformance.md")).unwrap());
    let specs = critest(role);
    let found = groups(&specs);
    let mut differences = String::new();
    let names: std::collections::BTreeSet<&String> = expected.keys().chain(found.keys()).collect();
    for name in names {
        let (documented, is) = (expected.get(name), found.get(name));
        if documented != is {
            writeln!(differences, "{name}: docs/conformance.md has {documented:?}, critest {is:?}").unwrap();
        }
    }
    assert!(differences.is_empty(), "against coracle {role}:\n{differences}\n{}", account(&specs));
}

#[test]
fn critest_of_the_runtime_matches_its_documented_results() {
    conforms_as_documented("runtime");
}

#[test]
fn critest_of_the_agent_matches_its_documented_results() {
    conforms_as_documented("agent");
}
