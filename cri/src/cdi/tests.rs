//! Tests of CDI devices: from files to specs.

use coracle_proto::cri::CdiDevice;
use serde_json::{Value, json};

use super::*;

fn write_file(dir: &Path, name: &str, value: &Value) {
    std::fs::create_dir_all(dir).expect("directory");
    std::fs::write(dir.join(name), value.to_string()).expect("file");
}

fn vendor(env: &str) -> Value {
    json!({
        "cdiVersion": "0.6.0", "kind": "vendor.com/gpu",
        "devices": [
            {"name": "0", "containerEdits": {
                "deviceNodes": [{"path": "/dev/gpu0", "hostPath": "/dev/null"}],
                "additionalGids": [0, 44]}},
            {"name": "1", "containerEdits": {"env": ["B=1"]}},
        ],
        "containerEdits": {
            "env": [env],
            "mounts": [{"hostPath": "/lib/x", "containerPath": "/usr/lib/x", "options": ["ro", "nosuid"]}],
            "hooks": [{"hookName": "createContainer", "path": "/bin/hook", "args": ["hook", "a"]}]},
    })
}

fn edited(names: &[&str], dirs: &[PathBuf]) -> Result<Value, CdiError> {
    let mut spec: Spec = serde_json::from_value(json!({
        "ociVersion": "1.2.0",
        "process": {"user": {"uid": 1000, "gid": 100}, "cwd": "/", "env": ["A=old", "C=3"]},
        "mounts": [{"destination": "/usr/lib/x", "type": "tmpfs", "source": "tmpfs"}],
        "linux": {},
    }))
    .expect("spec");
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    inject(&mut spec, &names, dirs)?;
    Ok(serde_json::to_value(spec).expect("json"))
}

#[test]
fn a_device_gets_the_changes_of_its_file_and_its_own() {
    let dir = tempfile::tempdir().expect("directory");
    write_file(dir.path(), "a.json", &vendor("A=new"));
    let dirs = [dir.path().to_owned()];
    let spec = edited(&["vendor.com/gpu=0", "vendor.com/gpu=1"], &dirs).expect("devices");
    assert_eq!(spec["process"]["env"], json!(["C=3", "A=new", "B=1"]));
    assert_eq!(spec["process"]["user"]["additionalGids"], json!([44]));
    let device = &spec["linux"]["devices"][0];
    assert_eq!(
        (&device["path"], &device["major"], &device["minor"]),
        (&json!("/dev/gpu0"), &json!(1), &json!(3))
    );
    assert_eq!((&device["uid"], &device["gid"]), (&json!(1000), &json!(100)), "the user's own");
    let rule = &spec["linux"]["resources"]["devices"][0];
    assert_eq!((&rule["allow"], &rule["access"], &rule["minor"]), (&json!(true), &json!("rwm"), &json!(3)));
    assert_eq!(
        spec["mounts"],
        json!([{"destination": "/usr/lib/x", "type": "bind", "source": "/lib/x", "options": ["rbind", "ro", "nosuid"]}])
    );
    assert_eq!(spec["hooks"]["createContainer"][0]["path"], "/bin/hook");
    assert_eq!(spec["hooks"]["createContainer"].as_array().map(Vec::len), Some(1), "once for both devices");
}

#[test]
fn a_later_directory_has_precedence_and_duplicates_are_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let (low, high) = (dir.path().join("low"), dir.path().join("high"));
    write_file(&low, "a.json", &vendor("A=low"));
    write_file(&high, "a.json", &vendor("A=high"));
    let dirs = [low.clone(), high];
    let spec = edited(&["vendor.com/gpu=1"], &dirs).expect("device");
    assert!(spec["process"]["env"].as_array().expect("env").contains(&json!("A=high")));
    write_file(&low, "b.json", &vendor("A=other"));
    assert!(edited(&["vendor.com/gpu=1"], &dirs).is_ok());
    let error = edited(&["vendor.com/gpu=1"], &dirs[..1]).expect_err("two").to_string();
    assert!(error.contains("more than one file"), "{error}");
}

#[test]
fn unresolvable_and_unsupported_devices_are_refused_by_name() {
    let dir = tempfile::tempdir().expect("directory");
    let dirs = [dir.path().to_owned()];
    let mut strange = vendor("A=1");
    strange["devices"][0]["containerEdits"]["tomorrow"] = json!(true);
    write_file(dir.path(), "strange.json", &strange);
    let error = edited(&["vendor.com/gpu=0", "vendor.com/gpu=9"], &dirs).expect_err("strange").to_string();
    for part in ["vendor.com/gpu=0, vendor.com/gpu=9", "strange.json", "tomorrow"] {
        assert!(error.contains(part), "{error}");
    }
    let rdt = json!({"cdiVersion": "0.7.0", "kind": "v.com/c", "devices": [
        {"name": "d", "containerEdits": {"intelRdt": {"closID": "x"}}}]});
    write_file(dir.path(), "rdt.json", &rdt);
    assert!(matches!(edited(&["v.com/c=d"], &dirs), Err(CdiError::Unsupported { .. })));
    let absent = json!({"cdiVersion": "0.7.0", "kind": "v.com/n", "devices": [
        {"name": "d", "containerEdits": {"deviceNodes": [{"path": "/dev/no-such-device"}]}}]});
    write_file(dir.path(), "absent.json", &absent);
    assert!(matches!(edited(&["v.com/n=d"], &dirs), Err(CdiError::Node { .. })));
}

#[test]
fn devices_of_field_and_annotations_are_merged() {
    let mut config = ContainerConfig::default();
    assert_eq!(requested(&config).expect("none"), Vec::<String>::new());
    config.cdi_devices = vec![CdiDevice { name: "v.com/c=a".into() }];
    config.annotations.insert("cdi.k8s.io/plugin".into(), "v.com/c=b, v.com/c=a".into());
    config.annotations.insert("other/x".into(), "v.com/c=z".into());
    assert_eq!(requested(&config).expect("names"), ["v.com/c=a", "v.com/c=b"]);
    for wrong in ["a", "v.com=a", "v.com/c=", "1v/c=a", "v.com/c=a-", ""] {
        config.cdi_devices = vec![CdiDevice { name: wrong.into() }];
        assert!(matches!(requested(&config), Err(CdiError::Name(_))), "{wrong:?}");
    }
}

#[test]
fn yaml_files_are_parsed() {
    let text =
        b"cdiVersion: \"0.5.0\"\nkind: v.com/c\ndevices:\n- name: d\n  containerEdits:\n    env: [\"A=1\"]\n";
    let file = spec::parse(text, false).expect("yaml");
    assert_eq!(
        (file.kind.as_str(), file.devices[0].container_edits.env.as_slice()),
        ("v.com/c", &["A=1".to_owned()][..])
    );
    assert!(spec::parse(b"cdiVersion: \"2.0.0\"\nkind: v.com/c\ndevices: []\n", false).is_err());
}

#[test]
fn a_file_that_is_too_large_or_not_regular_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let large = dir.path().join("large.json");
    std::fs::write(&large, format!("{}{}", vendor("A=new"), " ".repeat(4 << 20))).expect("file");
    let other = dir.path().join("other.json");
    std::fs::create_dir(&other).expect("directory");
    for (path, why) in [(large, "larger than"), (other, "not a regular file")] {
        let read = read_file(&path);
        assert!(matches!(&read, Some(Err(error)) if error.contains(why)), "{read:?}");
    }
}
