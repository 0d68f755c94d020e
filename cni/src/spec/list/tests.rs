//! Lists as data and as files in a directory.

use super::*;

fn parse(text: &str) -> Result<List, String> {
    List::parse(serde_json::from_str(text).unwrap())
}

fn dir(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    dir
}

#[test]
fn the_corpus_is_replayed() {
    coracle_testing::replay_corpus("network", fuzz);
    coracle_testing::replay_corpus("plugin_result", crate::spec::result::fuzz_result);
}

#[test]
fn the_highest_version_of_both_sides_is_taken() {
    let text =
        r#"{"cniVersion":"0.3.1","cniVersions":["1.0.0","9.1.0"],"name":"n","plugins":[{"type":"a"}]}"#;
    assert_eq!(parse(text).unwrap().version, Version::V1_0_0);
    let error = parse(r#"{"cniVersion":"0.2.0","name":"n","type":"a"}"#).unwrap_err();
    assert!(error.contains("0.2.0 is not supported"), "{error}");
}

#[test]
fn the_first_file_by_name_is_the_network() {
    let list = r#"{"cniVersion":"1.0.0","name":"list","plugins":[{"type":"a"},{"type":"b"}]}"#;
    let single = r#"{"cniVersion":"1.0.0","name":"single","type":"c"}"#;
    let files = dir(&[("20-list.conflist", list), ("10-single.conf", single), ("00-other.txt", "{")]);
    assert_eq!(List::first_of(files.path()).unwrap().unwrap().name, "single");
    std::fs::remove_file(files.path().join("10-single.conf")).unwrap();
    assert_eq!(List::first_of(files.path()).unwrap().unwrap().kinds().collect::<Vec<_>>(), ["a", "b"]);
    std::fs::remove_file(files.path().join("20-list.conflist")).unwrap();
    assert_eq!(List::first_of(files.path()).unwrap(), None);
    assert_eq!(List::first_of(&files.path().join("absent")).unwrap(), None);
}

#[test]
fn plugin_files_are_appended_to_the_list_unless_it_disables_them() {
    let with =
        |only: &str| format!(r#"{{"cniVersion":"1.1.0","name":"n",{only}"plugins":[{{"type":"a"}}]}}"#);
    let files =
        dir(&[("n.conflist", &with("")), ("n/2.conf", r#"{"type":"c"}"#), ("n/1.conf", r#"{"type":"b"}"#)]);
    assert_eq!(List::first_of(files.path()).unwrap().unwrap().kinds().collect::<Vec<_>>(), ["a", "b", "c"]);
    std::fs::write(files.path().join("n.conflist"), with(r#""loadOnlyInlinedPlugins":true,"#)).unwrap();
    assert_eq!(List::first_of(files.path()).unwrap().unwrap().kinds().collect::<Vec<_>>(), ["a"]);
    std::fs::write(files.path().join("n.conflist"), r#"{"cniVersion":"1.1.0","name":"n"}"#).unwrap();
    assert_eq!(List::first_of(files.path()).unwrap().unwrap().kinds().collect::<Vec<_>>(), ["b", "c"]);
}

#[test]
fn errors_name_the_field() {
    for (text, message) in [
        ("[]", "not a JSON object"),
        (r#"{"cniVersion":"1.0.0","type":"a"}"#, "name: is missing"),
        (r#"{"cniVersion":"1.0.0","name":"-n","type":"a"}"#, "name:"),
        (r#"{"cniVersion":"1.0.0","name":1,"type":"a"}"#, "name:"),
        (r#"{"name":"n","type":"a"}"#, "cniVersion: is missing"),
        (r#"{"cniVersion":1,"name":"n","type":"a"}"#, "cniVersion:"),
        (r#"{"cniVersions":1,"name":"n","type":"a"}"#, "cniVersions:"),
        (r#"{"cniVersions":[1],"name":"n","type":"a"}"#, "cniVersions:"),
        (r#"{"cniVersion":"1.0.0","name":"n","disableCheck":3,"type":"a"}"#, "disableCheck:"),
        (r#"{"cniVersion":"1.0.0","name":"n","disableGC":"no","type":"a"}"#, "disableGC:"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":{}}"#, "plugins:"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[1]}"#, "plugins:"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{}]}"#, "type: is missing"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"../a"}]}"#, "type:"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"a","ipam":{"type":"/"}}]}"#, "ipam.type:"),
        (r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"a","capabilities":1}]}"#, "capabilities:"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.contains(message), "{text}: {error}");
    }
    let files = dir(&[("n.conflist", r#"{"cniVersion":"1.0.0","name":"n","plugins":[]}"#)]);
    assert!(List::first_of(files.path()).unwrap_err().to_string().contains("no plugins"));
    std::fs::write(files.path().join("n.conflist"), "{").unwrap();
    assert!(List::first_of(files.path()).unwrap_err().to_string().contains("n.conflist"));
}

#[test]
fn a_plugin_gets_the_capabilities_that_it_declares() {
    let text = r#"{"cniVersion":"1.1.0","name":"n","plugins":[
        {"type":"a","x":1,"capabilities":{"portMappings":true,"mac":false}}]}"#;
    let list = parse(text).unwrap();
    let offered = Capabilities::from([("portMappings".into(), json!([1])), ("mac".into(), json!("m"))]);
    let conf = list.derive(&list.plugins[0], &offered, Some(json!({"ips": []})));
    let expected = json!({"cniVersion": "1.1.0", "name": "n", "type": "a", "x": 1,
        "runtimeConfig": {"portMappings": [1]}, "prevResult": {"ips": []}});
    assert_eq!(Value::from(conf), expected);
}
