//! The agent's fault points. Those of the runtime and the network are found by `recovery.rs`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use coracle_integration::repository as root;

/// Adds the text of each Rust file below a directory.
fn read(dir: &Path, texts: &mut String) {
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            read(&path, texts);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            texts.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn a_test_names_every_fault_point_of_the_agent() {
    const POINT: &str = "coracle_fault::point(\"";
    let mut texts = String::new();
    read(&root().join("agent"), &mut texts);
    let points: BTreeSet<&str> =
        texts.split(POINT).skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(points.len() > 10, "{points:?}");
    for point in points {
        let named = [format!("\"{point}\""), format!("\"{point}:")];
        let count: usize = named.iter().map(|text| texts.matches(text.as_str()).count()).sum();
        let defined = texts.matches(&format!("{POINT}{point}\"")).count();
        assert!(count > defined, "no test kills the agent at {point}");
    }
}
