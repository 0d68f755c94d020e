//! Modules with the same parent import each other in one direction only, without cycles.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

/// The modules that each module names. All of them have the same parent.
type Edges = BTreeMap<String, BTreeSet<String>>;

/// The word at the start of a text.
fn word(text: &str) -> &str {
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    &text[..end.unwrap_or(text.len())]
}

/// Reads a path, or a list of paths in braces, and returns the rest of the text.
fn read<'a>(text: &'a str, base: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    if let Some(list) = text.strip_prefix('{') {
        let mut list = list.trim_start();
        while !list.is_empty() && !list.starts_with('}') {
            let rest = read(list, base, found).trim_start_matches([',', '*']).trim_start();
            // No path begins here.
            list = if rest.len() == list.len() { "" } else { rest };
        }
        return list.strip_prefix('}').unwrap_or(list);
    }
    let name = word(text);
    let path = [base, &[name.to_owned()]].concat();
    match text[name.len()..].strip_prefix("::") {
        Some(rest) if !name.is_empty() => read(rest, &path, found),
        _ => {
            found.push(path);
            &text[name.len()..]
        }
    }
}

/// The paths that a module's code names by `crate::` or `super::`, from the crate's root.
fn named(code: &str, module: &[String]) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let (before, mut rest) = code.split_at(at);
            if before.ends_with(|letter: char| letter.is_alphanumeric() || "_:".contains(letter)) {
                continue;
            }
            let mut base = module.to_vec();
            while let Some(above) = rest.strip_prefix("super::") {
                base.pop();
                rest = above;
            }
            if let Some(path) = rest.strip_prefix("crate::") {
                base.clear();
                rest = path;
            }
            read(rest, &base, &mut found);
        }
    }
    found
}

/// The text without comments and tests, and the names of its modules that only a test build has.
fn code(text: &str) -> (String, Vec<&str>) {
    let mut parts = text.split("#[cfg(test)]\nmod ");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    let mut only_tests = vec!["tests", "fuzz"];
    for part in parts {
        let name = word(part);
        // A test module with a body is the last part of a file.
        let Some(rest) = part[name.len()..].strip_prefix(';') else { break };
        only_tests.push(name);
        kept.push_str(rest);
    }
    let lines = kept.lines().map(|line| line.split("//").next().unwrap_or_default());
    (lines.collect::<Vec<_>>().join("\n"), only_tests)
}

/// The imports between modules of the same parent, by parent.
fn edges() -> BTreeMap<String, Edges> {
    let (mut modules, mut only_tests) = (BTreeMap::new(), BTreeSet::new());
    for path in super::all_sources() {
        let below = path.strip_prefix(super::root()).unwrap().to_str().unwrap().trim_end_matches(".rs");
        let Some((name, module)) = below.split_once("/src/") else { continue };
        let root = ["lib", "main"].contains(&module);
        let module: Vec<String> = module.split('/').filter(|_| !root).map(str::to_owned).collect();
        let text = fs::read_to_string(&path).unwrap();
        let (code, tests) = code(&text);
        only_tests
            .extend(tests.iter().map(|test| (name.to_owned(), [&module[..], &[test.to_string()]].concat())));
        modules.insert((name.to_owned(), module), code);
    }
    let is_test = |name: &str, module: &[String]| {
        (1..=module.len()).any(|end| only_tests.contains(&(name.to_owned(), module[..end].to_vec())))
    };
    modules.retain(|(name, module), _| !is_test(name, module));
    let mut edges: BTreeMap<String, Edges> = BTreeMap::new();
    for ((name, module), code) in &modules {
        for path in named(code, module) {
            let same = module.iter().zip(&path).take_while(|(a, b)| a == b).count();
            let Some((own, other)) = module.get(same).zip(path.get(same)) else { continue };
            if modules.contains_key(&(name.clone(), path[..=same].to_vec())) {
                let parent = edges
                    .entry([std::slice::from_ref(name), &module[..same]].concat().join("::"))
                    .or_default();
                parent.entry(own.clone()).or_default().insert(other.clone());
            }
        }
    }
    edges
}

/// Returns the modules that are part of a cycle, or between two cycles.
fn cyclic(mut edges: Edges) -> BTreeSet<String> {
    loop {
        let before = edges.len();
        let named: BTreeSet<String> = edges.values().flatten().cloned().collect();
        let naming: BTreeSet<String> = edges.keys().cloned().collect();
        edges.retain(|module, _| named.contains(module));
        edges.values_mut().for_each(|others| others.retain(|other| naming.contains(other)));
        edges.retain(|_, others| !others.is_empty());
        if edges.len() == before {
            return edges.into_keys().collect();
        }
    }
}

#[test]
fn modules_of_the_same_parent_do_not_import_each_other_in_a_cycle() {
    let edges = edges();
    let server = &edges["controlplane/apiserver"];
    assert!(server["server"].contains("state") && server["write"].contains("quota"), "{server:?}");
    let cycles: BTreeMap<String, BTreeSet<String>> = edges
        .into_iter()
        .map(|(parent, edges)| (parent, cyclic(edges)))
        .filter(|(_, of)| !of.is_empty())
        .collect();
    assert_eq!(cycles, BTreeMap::new());
}

#[test]
fn paths_lists_and_cycles_are_found() {
    let text = "use crate::{\n    a,\n    b::{self, C, *},\n    d::E as F,\n};\nuse super::super::g::h; fn f() { crate::i::j() }";
    let found = named(&code(text).0, &["x".to_owned(), "y".to_owned()]);
    let found: Vec<String> = found.iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["a", "b::self", "b::C", "b::", "d::E", "as", "F", "i::j", "g::h"]);
    let edges = [("a", "b"), ("b", "a"), ("c", "d"), ("d", "a"), ("b", "e")];
    let edges = edges.iter().fold(Edges::new(), |mut edges, (from, to)| {
        edges.entry((*from).to_owned()).or_default().insert((*to).to_owned());
        edges
    });
    assert_eq!(cyclic(edges).into_iter().collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn each_controller_has_a_plan() {
    let mut without = BTreeSet::new();
    for entry in fs::read_dir(super::root().join("controlplane/controllers/src")).unwrap() {
        let path = entry.unwrap().path();
        if path.join("run.rs").exists() && !path.join("plan.rs").exists() {
            without.insert(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    // Replication controllers have the plan of replica sets. The history of revisions is a part of two controllers.
    assert_eq!(without.into_iter().collect::<Vec<_>>(), ["replication_controller", "revision_history"]);
}
