//! How flags, file and defaults become settings.

use super::*;

fn file(text: &str) -> Result<File, toml::de::Error> {
    toml::from_str(text)
}

#[test]
fn a_flag_overrides_the_file_and_the_file_the_default() {
    let from_file = file("[node]\nbridge = \"fromfile\"\nmax-pods = 7").unwrap().node;
    let flags = NodeSettings { bridge: Some("fromflag".into()), ..NodeSettings::default() };
    let dirs = Dirs { state: "/s".into(), run: "/r".into() };
    let settings = Settings { dirs, node: flags.over(from_file), plane: ControlPlaneSettings::default() };
    let node = settings.node().unwrap();
    assert_eq!((node.bridge.as_str(), node.max_pods, node.cgroup_root.as_str()), ("fromflag", 7, "/"));
}

#[test]
fn an_unknown_key_is_an_error_that_names_it() {
    let error = file("[node]\nbrigde = \"x\"").err().unwrap().to_string();
    assert!(error.contains("brigde"), "{error}");
}

#[test]
fn half_a_set_of_credentials_is_refused() {
    let node = NodeSettings { tls_cert_file: Some("/c".into()), ..NodeSettings::default() };
    let dirs = Dirs { state: "/s".into(), run: "/r".into() };
    let settings = Settings { dirs, node, plane: ControlPlaneSettings::default() };
    assert!(settings.node().is_err());
}
