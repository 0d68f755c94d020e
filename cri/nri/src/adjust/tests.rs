//! Merges of the adjustments and updates of several plugins.

use coracle_proto::nri::{
    Hook, Hooks, KeyValue, LinuxContainerUpdate, LinuxDevice, LinuxMemory, LinuxNamespace, LinuxPids, Mount,
    OptionalInt64, PosixRlimit,
};

use super::*;

fn answer(adjust: ContainerAdjustment) -> CreateContainerResponse {
    CreateContainerResponse { adjust: Some(adjust), ..Default::default() }
}

fn mount(destination: &str, source: &str) -> Mount {
    Mount { destination: destination.into(), source: source.into(), ..Default::default() }
}

fn variable(key: &str, value: &str) -> KeyValue {
    KeyValue { key: key.into(), value: value.into() }
}

fn limit(bytes: i64) -> LinuxResources {
    let memory = LinuxMemory { limit: Some(OptionalInt64 { value: bytes }), ..Default::default() };
    LinuxResources { memory: Some(memory), ..Default::default() }
}

fn update(id: &str, bytes: i64) -> ContainerUpdate {
    ContainerUpdate {
        container_id: id.into(),
        linux: Some(LinuxContainerUpdate { resources: Some(limit(bytes)) }),
        ignore_failure: false,
    }
}

fn creation() -> Creation {
    Creation::new(Container {
        id: "new".into(),
        env: vec!["OLD=1".into(), "KEPT=1".into()],
        mounts: vec![mount("/data", "/image")],
        ..Default::default()
    })
}

#[test]
fn a_plugin_sees_the_changes_of_the_previous_plugins() {
    let mut creation = creation();
    let first = ContainerAdjustment {
        env: vec![variable("-OLD", ""), variable("NEW", "2")],
        mounts: vec![mount("/data", "/host")],
        args: vec!["run".into()],
        annotations: [("a".to_owned(), "1".to_owned())].into(),
        ..Default::default()
    };
    creation.merge("10-a", answer(first)).expect("alone");
    assert_eq!(creation.container.env, ["KEPT=1", "NEW=2"]);
    assert_eq!(creation.container.mounts, [mount("/data", "/host")]);
    assert_eq!(creation.container.args, ["run"]);
    assert_eq!(creation.container.annotations["a"], "1");
    assert_eq!(creation.adjustment.env, [variable("-OLD", ""), variable("NEW", "2")]);
}

#[test]
fn two_plugins_cannot_set_the_same_field() {
    let linux = |linux| ContainerAdjustment { linux: Some(linux), ..Default::default() };
    let same = [
        ContainerAdjustment { env: vec![variable("X", "1")], ..Default::default() },
        ContainerAdjustment { mounts: vec![mount("/m", "/s")], ..Default::default() },
        ContainerAdjustment { args: vec!["a".into()], ..Default::default() },
        ContainerAdjustment { annotations: [("a".to_owned(), String::new())].into(), ..Default::default() },
        ContainerAdjustment {
            rlimits: vec![PosixRlimit { r#type: "RLIMIT_NOFILE".into(), hard: 1, soft: 1 }],
            ..Default::default()
        },
        linux(LinuxContainerAdjustment { resources: Some(limit(5)), ..Default::default() }),
        linux(LinuxContainerAdjustment { cgroups_path: "/x/y".into(), ..Default::default() }),
        linux(LinuxContainerAdjustment {
            devices: vec![LinuxDevice { path: "/dev/x".into(), ..Default::default() }],
            ..Default::default()
        }),
        linux(LinuxContainerAdjustment {
            namespaces: vec![LinuxNamespace { r#type: "ipc".into(), path: String::new() }],
            ..Default::default()
        }),
    ];
    for adjustment in same {
        let mut creation = creation();
        creation.merge("10-a", answer(adjustment.clone())).expect("first");
        let error = creation.merge("20-b", answer(adjustment.clone())).expect_err("second");
        assert!(error.to_string().contains("\"20-b\" and \"10-a\""), "{error} of {adjustment:?}");
    }
}

#[test]
fn a_plugin_that_removes_first_may_set_again() {
    let mut creation = creation();
    let set = |value: &str| ContainerAdjustment { env: vec![variable("X", value)], ..Default::default() };
    creation.merge("10-a", answer(set("1"))).expect("first");
    let again = ContainerAdjustment {
        env: vec![variable("-X", ""), variable("X", "2")],
        args: vec![String::new(), "other".into()],
        ..Default::default()
    };
    creation.merge("20-b", answer(again)).expect("removed before");
    assert_eq!(creation.adjustment.env, [variable("-X", ""), variable("X", "2")]);
    assert!(creation.container.env.contains(&"X=2".to_owned()));
    assert_eq!(creation.adjustment.args, ["other"]);
}

#[test]
fn hooks_of_all_plugins_are_kept() {
    let mut creation = creation();
    for name in ["10-a", "20-b"] {
        let hook = Hook { path: format!("/{name}"), ..Default::default() };
        let hooks = Hooks { create_runtime: vec![hook], ..Default::default() };
        creation
            .merge(name, answer(ContainerAdjustment { hooks: Some(hooks), ..Default::default() }))
            .expect("no conflict");
    }
    let hooks = creation.adjustment.hooks.expect("hooks");
    assert_eq!(hooks.create_runtime.iter().map(|hook| &hook.path).collect::<Vec<_>>(), ["/10-a", "/20-b"]);
    assert_eq!(creation.owners.plugins.owners["new"].simple[&Field::OciHooks.into()], "10-a,20-b");
}

#[test]
fn updates_of_other_containers_are_merged_and_of_the_new_one_refused() {
    let mut creation = creation();
    let asks =
        |update| CreateContainerResponse { update: vec![update], ..CreateContainerResponse::default() };
    creation.merge("10-a", asks(update("other", 1))).expect("first");
    assert!(creation.merge("20-b", asks(update("other", 2))).is_err());
    let polite = ContainerUpdate { ignore_failure: true, ..update("other", 2) };
    creation.merge("20-b", asks(polite)).expect("may fail");
    assert_eq!(creation.updates.list, [update("other", 1)]);
    let error = creation.merge("30-c", asks(update("new", 1))).expect_err("itself");
    assert!(matches!(error, MergeError::UpdatesNewContainer { .. }));
}

#[test]
fn a_refused_update_leaves_no_claim_and_other_updates_are_joined() {
    let (mut updates, mut owners) = (Updates::default(), Owners::default());
    let pids = |limit| Some(LinuxPids { limit });
    let of_c = |resources| ContainerUpdate {
        container_id: "c".into(),
        linux: Some(LinuxContainerUpdate { resources: Some(resources) }),
        ignore_failure: false,
    };
    let first = of_c(LinuxResources { pids: pids(7), ..Default::default() });
    updates.merge("10-a", &first, &mut owners).expect("first");
    updates.merge("10-a", &update("d", 2), &mut owners).expect("another container");
    // The memory limit has no owner and is merged first. The limit of processes has another owner.
    let refused = of_c(LinuxResources { pids: pids(5), ..limit(3) });
    assert!(updates.merge("20-b", &refused, &mut owners).is_err());
    let polite = ContainerUpdate { ignore_failure: true, ..refused };
    updates.merge("20-b", &polite, &mut owners).expect("may fail");
    assert_eq!(updates.list, [first, update("d", 2)]);
    updates.merge("30-c", &update("c", 9), &mut owners).expect("not claimed");
    let joined = of_c(LinuxResources { pids: pids(7), ..limit(9) });
    assert_eq!(updates.list, [joined, update("d", 2)]);
}

#[test]
fn an_update_is_changed_by_the_plugins_that_ask() {
    let mut change = Change::new("c", limit(7));
    change.merge("10-a", &[]).expect("nothing");
    assert!(!change.changed);
    change.merge("20-b", &[update("c", 9), update("d", 3)]).expect("first");
    assert_eq!((change.resources.clone(), change.changed), (limit(9), true));
    assert_eq!(change.updates.list, [update("d", 3)]);
    assert!(change.merge("30-c", &[update("c", 10)]).is_err());
    assert_eq!(change.resources, limit(9));
}
