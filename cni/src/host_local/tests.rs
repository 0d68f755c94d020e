//! Tests of the plugin's results and files for given configurations.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::*;

fn request(command: Command, id: &str, dir: &Path, ipam: &Value) -> Request {
    let mut ipam = ipam.clone();
    ipam["type"] = json!("host-local");
    ipam["dataDir"] = json!(dir);
    let conf = json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge", "ipam": ipam});
    Request {
        command,
        container_id: id.into(),
        netns: None,
        ifname: "eth0".into(),
        args: String::new(),
        path: Vec::new(),
        conf: conf.as_object().unwrap().clone(),
    }
}

fn act(request: &Request) -> Result<Vec<String>, Error> {
    let ipam = Ipam::of(request)?;
    let owner = Owner { id: request.container_id.clone(), ifname: request.ifname.clone() };
    match request.command {
        Command::Add => {
            let answer = ipam.add(request, &owner, None)?;
            Ok(answer.ips.iter().map(|ip| ip.address.to_string()).collect())
        }
        Command::Del => ipam.del(request, &owner, None).map(|()| Vec::new()),
        _ => ipam.status().map(|()| Vec::new()),
    }
}

fn add(dir: &Path, id: &str, ipam: &Value) -> Result<Vec<String>, Error> {
    act(&request(Command::Add, id, dir, ipam))
}

fn del(dir: &Path, id: &str, ipam: &Value) {
    act(&request(Command::Del, id, dir, ipam)).unwrap();
}

fn files(dir: &Path) -> Vec<String> {
    let entries =
        fs::read_dir(dir.join("net")).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.collect();
    names.sort();
    names
}

#[test]
fn an_add_takes_one_address_of_each_set_and_writes_the_files_of_host_local() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd00::/64"}]]});
    assert_eq!(add(dir.path(), "a", &ipam).unwrap(), ["10.1.2.2/24", "fd00::2/64"]);
    assert_eq!(add(dir.path(), "b", &ipam).unwrap(), ["10.1.2.3/24", "fd00::3/64"]);
    let names =
        ["10.1.2.2", "10.1.2.3", "fd00::2", "fd00::3", "last_reserved_ip.0", "last_reserved_ip.1", "lock"];
    assert_eq!(files(dir.path()), names);
    assert_eq!(fs::read_to_string(dir.path().join("net/10.1.2.2")).unwrap(), "a\r\neth0");
    del(dir.path(), "a", &ipam);
    del(dir.path(), "a", &ipam);
    assert_eq!(files(dir.path())[0], "10.1.2.3");
}

#[test]
fn a_freed_address_is_reused_last() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"subnet": "10.1.2.0/29"});
    assert_eq!(add(dir.path(), "a", &ipam).unwrap(), ["10.1.2.2/29"]);
    del(dir.path(), "a", &ipam);
    for id in ["b", "c", "d", "e", "f"] {
        add(dir.path(), id, &ipam).unwrap();
    }
    let error = add(dir.path(), "g", &ipam).unwrap_err();
    assert_eq!(error.to_string(), "no address is free in 10.1.2.0/29: all 5 are in use");
    assert_eq!(error.code(), 11);
    assert_eq!(act(&request(Command::Status, "", dir.path(), &ipam)).unwrap_err().code(), 11);
    del(dir.path(), "c", &ipam);
    assert_eq!(add(dir.path(), "g", &ipam).unwrap(), ["10.1.2.4/29"]);
}

#[test]
fn allocation_continues_in_the_next_range_of_a_set() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.11"},
        {"subnet": "10.2.0.0/24", "rangeStart": "10.2.0.5", "rangeEnd": "10.2.0.5", "gateway": "10.2.0.9"}]]});
    assert_eq!(add(dir.path(), "a", &ipam).unwrap(), ["10.1.0.10/24"]);
    assert_eq!(add(dir.path(), "b", &ipam).unwrap(), ["10.1.0.11/24"]);
    assert_eq!(add(dir.path(), "c", &ipam).unwrap(), ["10.2.0.5/24"]);
    del(dir.path(), "b", &ipam);
    assert_eq!(add(dir.path(), "d", &ipam).unwrap(), ["10.1.0.11/24"]);
    let error = add(dir.path(), "e", &ipam).unwrap_err().to_string();
    assert!(error.contains("from 10.1.0.10 to 10.1.0.11, 10.2.0.0/24 from 10.2.0.5"), "{error}");
}

#[test]
fn a_failed_add_with_a_full_second_set_frees_its_address_of_the_first_set() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "10.1.3.0/30"}]]});
    add(dir.path(), "a", &ipam).unwrap();
    add(dir.path(), "b", &ipam).unwrap_err();
    assert_eq!(files(dir.path())[..2], ["10.1.2.2", "10.1.3.2"]);
}

#[test]
fn requested_addresses_are_assigned_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "fd00::/64"}]]});
    let mut wants = request(Command::Add, "a", dir.path(), &ipam);
    wants.conf.insert("runtimeConfig".into(), json!({"ips": ["10.1.2.77/24", "fd00::7"]}));
    assert_eq!(act(&wants).unwrap(), ["10.1.2.77/24", "fd00::7/64"]);
    wants.container_id = "b".into();
    assert_eq!(act(&wants).unwrap_err().to_string(), "the address 10.1.2.77 is taken by a");
    wants.conf.remove("runtimeConfig");
    wants.args = "IgnoreUnknown=1;IP=10.1.2.1".into();
    assert!(act(&wants).unwrap_err().to_string().contains("gateway"));
    wants.args = "IgnoreUnknown=1;IP=10.9.9.9".into();
    assert!(act(&wants).unwrap_err().to_string().contains("10.9.9.9 is in no range of the network"));
    wants.conf.insert("args".into(), json!({"cni": {"ips": ["10.1.2.50", "10.1.2.51"]}}));
    wants.args = String::new();
    let two = "10.1.2.51 is the second requested address of 10.1.2.0/24, which assigns one address";
    assert!(act(&wants).unwrap_err().to_string().ends_with(two));
    wants.args = "IP=x".into();
    assert_eq!(act(&wants).unwrap_err().code(), 7);
    wants.args = String::new();
    wants.conf.insert("args".into(), json!({"cni": {"ips": ["10.1.2.50"]}}));
    assert_eq!(act(&wants).unwrap(), ["10.1.2.50/24", "fd00::8/64"], "the refused requests took no address");
    assert!(act(&wants).unwrap_err().to_string().ends_with("is taken by b"), "added twice");
}

#[test]
fn ranges_of_the_runtime_come_first() {
    let dir = tempfile::tempdir().unwrap();
    let mut wants = request(Command::Add, "a", dir.path(), &json!({"subnet": "10.1.2.0/24"}));
    wants.conf.insert("runtimeConfig".into(), json!({"ipRanges": [[{"subnet": "10.7.0.0/16"}]]}));
    assert_eq!(act(&wants).unwrap(), ["10.7.0.2/16", "10.1.2.2/24"]);
}

#[test]
fn gc_frees_addresses_without_owner_and_restore_records_owners() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"subnet": "10.1.2.0/24"});
    add(dir.path(), "gone", &ipam).unwrap();
    add(dir.path(), "here", &ipam).unwrap();
    fs::write(dir.path().join("net/10.1.2.9"), "old").unwrap();
    let valid = |owner: &Owner| owner.is("here", "eth0") || owner.is("old", "eth0");
    Store::open(&dir.path().join("net")).unwrap().retain(valid).unwrap();
    assert_eq!(files(dir.path())[..2], ["10.1.2.3", "10.1.2.9"]);
    let lives = request(Command::Add, "lives", dir.path(), &ipam);
    assert!(restore(&lives, "10.1.2.77".parse().unwrap()).unwrap());
    assert!(restore(&lives, "10.1.2.77".parse().unwrap()).unwrap());
    assert!(!restore(&lives, "10.9.9.9".parse().unwrap()).unwrap());
    assert!(restore(&lives, "10.1.2.3".parse().unwrap()).is_err());
}

#[test]
fn the_file_of_an_interrupted_reservation_reserves_no_address_and_changes_no_owner() {
    let dir = tempfile::tempdir().unwrap();
    let ipam = json!({"subnet": "10.1.2.0/24"});
    add(dir.path(), "a", &ipam).unwrap();
    // A process that is killed right after it has made the link leaves this state.
    fs::hard_link(dir.path().join("net/10.1.2.2"), dir.path().join("net/.taking")).unwrap();
    add(dir.path(), "b", &ipam).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("net/10.1.2.2")).unwrap(), "a\r\neth0");
}

#[test]
fn every_wrong_field_is_named() {
    let dir = tempfile::tempdir().unwrap();
    for (ipam, code, message) in [
        (json!({}), 7, "no range"),
        (json!({"ranges": []}), 7, "no range"),
        (json!({"ranges": [[]]}), 7, "ipam.ranges[0]"),
        (json!({"subnet": "10.0.0.1/24"}), 7, "host bits"),
        (json!({"subnet": "x"}), 7, "ipam"),
        (json!({"subnet": "10.0.0.0/31"}), 7, "too small"),
        (json!({"subnet": "fd00::/127"}), 7, "too small"),
        (json!({"subnet": "10.0.0.0/24", "rangeStart": "10.0.1.1"}), 7, "rangeStart"),
        (json!({"subnet": "10.0.0.0/24", "rangeEnd": "10.0.1.1"}), 7, "rangeEnd"),
        (json!({"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.9", "rangeEnd": "10.0.0.8"}), 7, "rangeStart"),
        (json!({"subnet": "10.0.0.0/24", "rangeStart": "10.0.0.1", "rangeEnd": "10.0.0.1"}), 7, "too small"),
        (json!({"subnet": "10.0.0.0/24", "gateway": "::1"}), 7, "gateway"),
        (json!({"rangeStart": "10.0.0.1"}), 7, "ipam.rangeStart"),
        (json!({"subnet": "10.0.0.0/24", "routes": [{"dst": "x"}]}), 7, "ipam"),
        (json!({"subnet": "10.0.0.0/24", "routes": [{"dst": "10.0.0.0/8", "via": "x"}]}), 2, "ipam.via"),
        (json!({"subnet": "10.0.0.0/24", "colour": 1}), 2, "ipam.colour"),
        (json!({"subnet": "10.0.0.0/24", "resolvConf": "/absent"}), 5, "/absent"),
        (json!({"ranges": [[{"subnet": "10.0.0.0/24"}, {"subnet": "fd00::/64"}]]}), 7, "mixes"),
        (json!({"ranges": [[{"subnet": "10.0.0.0/24"}, {"subnet": "10.0.0.0/16"}]]}), 7, "overlaps"),
        (json!({"ranges": [[{"subnet": "10.0.0.0/24"}], [{"subnet": "10.0.0.0/16"}]]}), 7, "range set 0"),
    ] {
        let error = add(dir.path(), "a", &ipam).unwrap_err();
        assert!(
            error.code() == code && error.to_string().contains(message),
            "{ipam}: {error} ({})",
            error.code()
        );
        assert!(!dir.path().join("net").exists(), "{ipam}");
    }
}

#[test]
fn the_directory_is_listed_only_after_foreign_changes() {
    let dir = tempfile::tempdir().unwrap();
    let attachments = Cache::open(&dir.path().join("run"), &dir.path().join("lib")).unwrap();
    let ranges = json!({"subnet": "10.1.0.0/16"});
    let add = |id: &str| {
        let request = request(Command::Add, id, dir.path(), &ranges);
        let owner = Owner { id: id.into(), ifname: "eth0".into() };
        let before = crate::address_store::listings::total();
        let answer = Ipam::of(&request).unwrap().add(&request, &owner, Some(&attachments)).unwrap();
        (answer.ips[0].address.ip(), crate::address_store::listings::total() - before)
    };
    let del = |id: &str, address: IpAddr| {
        let mut request = request(Command::Del, id, dir.path(), &ranges);
        let result = json!({"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "sandbox": "/x"}],
            "ips": [{"address": format!("{address}/16"), "interface": 0}]});
        request.conf.insert("prevResult".into(), result);
        let owner = Owner { id: id.into(), ifname: "eth0".into() };
        Ipam::of(&request).unwrap().del(&request, &owner, Some(&attachments)).unwrap();
    };
    let (first, listings) = add("first");
    assert_eq!(listings, 1, "the first allocation lists the directory");
    for number in 0..50 {
        let (address, listings) = add(&format!("a{number}"));
        assert_eq!(listings, 0, "{number}");
        del(&format!("a{number}"), address);
    }
    // The next change must have a later modification time, also on kernels without exact times.
    let (net, clock) = (dir.path().join("net"), dir.path().join("clock"));
    let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    coracle_testing::eventually("a later modification time", 10, || {
        fs::write(&clock, "x").unwrap();
        modified(&clock) > modified(&net)
    });
    fs::remove_file(dir.path().join("net").join(first.to_string())).unwrap();
    assert_eq!(add("after").1, 1, "another process changed the directory");
    assert_eq!(add("last").1, 0);
}
