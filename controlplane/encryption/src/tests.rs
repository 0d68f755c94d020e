//! Tests of configuration files, of patterns for resources, and of the rotation of keys.

use std::{fs, os::unix::fs::PermissionsExt as _};

use super::*;

/// Keys of 32 bytes in base64.
const A: &str = "YWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWFhYWE=";
const B: &str = "YmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmJiYmI=";
const SECRET: &str = "/secrets/n/s";

fn write(directory: &Path, resources: &str) -> PathBuf {
    let path = directory.join("encryption.yaml");
    let text = format!(
        "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources: {resources}\n"
    );
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn keys(scheme: &str, keys: &[(&str, &str)]) -> String {
    let keys: Vec<String> =
        keys.iter().map(|(name, key)| format!("{{name: {name}, secret: {key}}}")).collect();
    format!("{{{scheme}: {{keys: [{}]}}}}", keys.join(", "))
}

fn load(resources: &str) -> Result<Encryption, Error> {
    let directory = tempfile::tempdir().unwrap();
    Encryption::load(&write(directory.path(), resources))
}

#[test]
fn the_service_of_a_value_is_known_by_its_name() {
    let stored = b"k8s:enc:kms:v2:vault:x";
    assert!(is_of_service(stored, "vault"));
    assert!(!is_of_service(stored, "vau") && !is_of_service(stored, "vault2"));
    assert!(!is_of_service(b"{}", "vault"));
}

#[test]
fn the_first_match_of_a_resource_decides() {
    let box_a = keys("secretbox", &[("a", A)]);
    let all = load(&format!(
        "[{{resources: [secrets, pandas.example.com], providers: [{box_a}]}}, \
          {{resources: ['*.apps', configmaps], providers: [{{identity: {{}}}}]}}, \
          {{resources: ['*.*'], providers: [{}]}}]",
        keys("aescbc", &[("b", B)])
    ))
    .unwrap();
    let prefix = |key: &str| {
        let sealed = all.seal(key, b"x").unwrap()?;
        Some(String::from_utf8_lossy(&sealed).split(':').take(5).collect::<Vec<_>>().join(":"))
    };
    assert_eq!(prefix(SECRET).as_deref(), Some("k8s:enc:secretbox:v1:a"));
    assert_eq!(prefix("example.com/pandas/n/x").as_deref(), Some("k8s:enc:secretbox:v1:a"));
    assert_eq!(prefix("apps/deployments/n/x"), None);
    assert_eq!(prefix("/configmaps/n/x"), None);
    assert_eq!(prefix("other/secrets/n/x").as_deref(), Some("k8s:enc:aescbc:v1:b"));
    assert!(all.covers("/pods/n/x") && !all.covers("allocations"));
}

#[test]
fn the_first_provider_writes_and_all_read() {
    let directory = tempfile::tempdir().unwrap();
    let of = |providers: &[String]| {
        write(directory.path(), &format!("[{{resources: [secrets], providers: [{}]}}]", providers.join(", ")))
    };
    let all = Encryption::load(&of(&["{identity: {}}".to_owned()])).unwrap();
    assert!(all.seal(SECRET, b"value").unwrap().is_none() && all.is_current(SECRET, b"value"));
    let mut written = Vec::new();
    for providers in [
        vec![keys("aescbc", &[("a", A)])],
        vec![keys("aescbc", &[("b", B), ("a", A)])],
        vec![keys("aesgcm", &[("a", A)]), keys("aescbc", &[("b", B), ("a", A)])],
        vec![
            keys("secretbox", &[("a", A)]),
            keys("aesgcm", &[("a", A)]),
            keys("aescbc", &[("b", B), ("a", A)]),
        ],
    ] {
        of(&providers);
        all.reload().unwrap();
        written.iter().for_each(|old: &Vec<u8>| assert!(!all.is_current(SECRET, old)));
        let sealed = all.seal(SECRET, b"value").unwrap().unwrap();
        assert!(is_encrypted(&sealed) && all.is_current(SECRET, &sealed));
        written.push(sealed);
        for old in &written {
            assert_eq!(all.open(SECRET, old).unwrap().unwrap(), b"value");
        }
    }
    assert_eq!(all.open(SECRET, b"{}").unwrap(), None);
    // An invalid file changes nothing.
    of(&["{}".to_owned()]);
    assert!(all.reload().is_err());
    assert!(all.is_current(SECRET, written.last().unwrap()));
    // Without the key the value cannot be read.
    of(&[keys("aescbc", &[("c", A)])]);
    all.reload().unwrap();
    assert_eq!(all.open(SECRET, &written[0]).unwrap(), None);
}

#[test]
fn a_reload_keeps_the_plugin() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kms.sock");
    let _behaviour = kms::tests::plugin(&socket);
    let endpoint = format!("unix://{}", socket.display());
    let kms = format!("{{kms: {{apiVersion: v2, name: p, endpoint: '{endpoint}', timeout: 1m}}}}");
    let path = write(directory.path(), &format!("[{{resources: [secrets], providers: [{kms}]}}]"));
    let all = Encryption::load(&path).unwrap();
    let sealed = all.seal(SECRET, b"value").unwrap().unwrap();
    assert!(sealed.starts_with(b"k8s:enc:kms:v2:p:"));
    // The plugin is gone, but a reload needs no new seed.
    fs::remove_file(&socket).unwrap();
    write(directory.path(), &format!("[{{resources: [secrets, configmaps], providers: [{kms}]}}]"));
    all.reload().unwrap();
    assert_eq!(all.open(SECRET, &sealed).unwrap().unwrap(), b"value");
}

#[test]
fn a_plugin_that_does_not_respond_is_no_error_at_the_start_and_one_of_a_reload() {
    let directory = tempfile::tempdir().unwrap();
    let kms = "{kms: {apiVersion: v2, name: p, endpoint: 'unix:///absent/kms.sock'}}";
    let path = write(directory.path(), &format!("[{{resources: [secrets], providers: [{kms}]}}]"));
    let all = Encryption::load(&path).unwrap();
    assert!(matches!(all.health(), Err(Error::Kms { .. })));
    assert!(matches!(all.ready(SECRET), Err(Error::Kms { .. })));
    assert!(matches!(all.seal(SECRET, b"value"), Err(Error::Kms { .. })));
    all.ready("/pods/n/p").unwrap();
    write(directory.path(), "[{resources: [secrets], providers: [{identity: {}}]}]");
    all.reload().unwrap();
    all.health().unwrap();
    write(directory.path(), &format!("[{{resources: [secrets], providers: [{kms}]}}]"));
    assert!(matches!(all.reload(), Err(Error::Kms { .. })));
    assert_eq!(all.seal(SECRET, b"value").unwrap(), None, "the current providers are kept");
}

#[test]
fn the_error_of_an_invalid_file_names_the_field_and_no_secret() {
    let one = |providers: &str| format!("[{{resources: [secrets], providers: [{providers}]}}]");
    for (resources, field) in [
        ("[]".to_owned(), "resources"),
        (one(""), "providers"),
        (one("{}"), "providers[0]"),
        (one("{identity: {}, aescbc: {keys: []}}"), "keys"),
        (one("{aescbc: {keys: [{name: a, secret: c2hvcnQ=}]}}"), "aescbc.keys[0].secret"),
        (one("{aesgcm: {keys: [{name: a, secret: '!'}]}}"), "aesgcm.keys[0].secret"),
        (one("{secretbox: {keys: [{name: 'a:b', secret: c2hvcnQ=}]}}"), "secretbox.keys[0].name"),
        (one("{kms: {apiVersion: v1, name: a, endpoint: 'unix:///a'}}"), "kms.apiVersion"),
        (one("{kms: {apiVersion: v2, name: a, endpoint: 'http://a'}}"), "kms.endpoint"),
        (one("{kms: {apiVersion: v2, name: a, endpoint: 'unix:///a', timeout: soon}}"), "kms.timeout"),
        (one("{other: {}}"), "other"),
        ("[{resources: ['*'], providers: [{identity: {}}]}]".to_owned(), "*.*"),
        ("[{resources: [Secrets], providers: [{identity: {}}]}]".to_owned(), "lower case"),
    ] {
        let reason = load(&resources).err().unwrap().to_string();
        assert!(reason.contains(field) && !reason.contains("c2hvcnQ"), "{field}: {reason}");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = write(directory.path(), &one("{identity: {}}"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(matches!(Encryption::load(&path), Err(Error::Exposed { .. })));
}
