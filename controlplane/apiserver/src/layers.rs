//! Checks that the modules of this crate depend in one direction: server, handlers, write pipeline, services, cache.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

/// Modules below the crate's root that each module below the root names.
type Edges = BTreeMap<String, BTreeSet<String>>;

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The text without comments and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The word at the start of a text.
fn word(text: &str) -> &str {
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    &text[..end.unwrap_or(text.len())]
}

/// The modules that paths beginning with `crate::` name, in lists in braces too.
fn named(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            names.insert(word(rest).to_owned());
            continue;
        };
        let (mut depth, mut start) = (1, 0);
        for (at, letter) in list.char_indices() {
            match letter {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => {}
                _ => continue,
            }
            if depth <= 1 && matches!(letter, ',' | '}') {
                names.insert(word(list[start..at].trim_start()).to_owned());
                start = at + 1;
            }
            if depth == 0 {
                break;
            }
        }
    }
    // A comma before the closing brace ends an empty name.
    names.remove("");
    names
}

fn edges() -> Edges {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&root, &mut all);
    let mut edges = Edges::new();
    for path in all {
        let below = path.strip_prefix(&root).unwrap();
        let is_test = below.components().any(|part| {
            matches!(
                part.as_os_str().to_str(),
                Some("tests" | "tests.rs" | "lib.rs" | "fuzz.rs" | "layers.rs")
            )
        });
        if is_test {
            continue;
        }
        let first = below.iter().next().unwrap().to_str().unwrap();
        let module = first.trim_end_matches(".rs").to_owned();
        let names = named(&code(&fs::read_to_string(&path).unwrap()));
        edges.entry(module).or_default().extend(names);
    }
    let modules: BTreeSet<String> = edges.keys().cloned().collect();
    for (module, names) in &mut edges {
        names.retain(|name| name != module && modules.contains(name));
    }
    edges
}

/// Removes the modules that name none of the others until each one left is part of a cycle or above one.
fn cyclic(mut edges: Edges) -> Edges {
    loop {
        let lowest: Vec<String> =
            edges.iter().filter(|(_, names)| names.is_empty()).map(|(module, _)| module.clone()).collect();
        if lowest.is_empty() {
            return edges;
        }
        edges.retain(|module, _| !lowest.contains(module));
        edges.values_mut().for_each(|names| names.retain(|name| !lowest.contains(name)));
    }
}

#[test]
fn modules_have_no_import_cycles() {
    let edges = edges();
    assert!(edges["server"].contains("state") && edges["write"].contains("quota"), "{edges:?}");
    assert_eq!(cyclic(edges), Edges::new());
}

#[test]
fn paths_and_lists_name_modules() {
    let text = "use crate::{\n    a,\n    b::{self, C},\n    d::E,\n};\nfn f() { crate::g::h() } // crate::i";
    let names: Vec<String> = named(&code(text)).into_iter().collect();
    assert_eq!(names, ["a", "b", "d", "g"]);
    let pair = |a: &str, b: &str| (a.to_owned(), BTreeSet::from([b.to_owned()]));
    let cycle =
        Edges::from([pair("a", "b"), pair("b", "a"), ("c".to_owned(), BTreeSet::new()), pair("d", "c")]);
    assert_eq!(cyclic(cycle).into_keys().collect::<Vec<_>>(), ["a", "b"]);
}
