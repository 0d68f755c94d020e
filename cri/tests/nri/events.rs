//! Events of plugins, and plugins that fail or do not answer.

use std::time::Duration;

use coracle_proto::nri::{ContainerState, Event};
use coracle_testing::eventually_async;

use crate::fixture::Machine;
use crate::plugin::{Plugin, PluginReply};

pub(crate) async fn every_event_is_delivered_once_in_order_and_with_names(machine: &mut Machine) {
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", |_| PluginReply::Yes).await;
    assert_eq!(plugin.configured().runtime_name, "coracle");
    assert_eq!(plugin.configured().request_timeout, 30_000);
    let pod = machine.pod("told").await;
    let by_itself = machine.run(&pod, "a", &["sh", "-c", "exit 3"]).await;
    machine.wait_exited(&by_itself).await;
    plugin.hears(&by_itself, "StopContainer").await;
    let stopped = machine.run(&pod, "b", &["sleep", "1000"]).await;
    machine.stop(&stopped, 0).await;
    machine.remove(&stopped).await;
    let killed = machine.run(&pod, "c", &["sleep", "1000"]).await;
    machine.remove_pod(&pod).await;
    let whole = [
        "CreateContainer",
        "ValidateContainerAdjustment",
        "PostCreateContainer",
        "StartContainer",
        "PostStartContainer",
        "StopContainer",
        "RemoveContainer",
    ];
    for id in [&by_itself, &stopped, &killed] {
        assert_eq!(plugin.methods_of(id), whole, "{id}");
    }
    assert_eq!(plugin.methods_of(&pod), ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"]);
    let created = &plugin.heard_of(&by_itself)[0].about;
    let (seen_pod, container) = (created.pod.clone().unwrap(), created.container.clone().unwrap());
    assert_eq!((seen_pod.name.as_str(), seen_pod.namespace.as_str()), ("told", "default"));
    assert_eq!((seen_pod.uid.as_str(), seen_pod.ips.len()), ("uid-told", 1));
    assert!(seen_pod.linux.unwrap().cgroup_parent.ends_with("/kubepods/pod-told"));
    assert_eq!((container.name.as_str(), container.pod_sandbox_id.as_str()), ("a", pod.as_str()));
    assert_eq!(container.args, ["sh", "-c", "exit 3"]);
    assert!(container.linux.unwrap().cgroups_path.ends_with(&by_itself));
    let ended = plugin.heard_of(&by_itself)[5].about.container.clone().unwrap();
    assert_eq!((ended.state(), ended.exit_code), (ContainerState::ContainerStopped, 3));
    plugin.leave();
}

pub(crate) async fn an_older_plugin_gets_state_changes(machine: &mut Machine) {
    let old = |heard: &crate::plugin::ReceivedCall| {
        let known = ["CreateContainer", "StopContainer", "UpdateContainer"];
        if heard.method.starts_with("StateChange") || known.contains(&heard.method.as_str()) {
            PluginReply::Yes
        } else {
            PluginReply::Unknown
        }
    };
    let events = (1 << (Event::RunPodSandbox as i32 - 1)) | (1 << (Event::RemoveContainer as i32 - 1));
    let plugin = Plugin::join_for(&machine.path("nri.sock"), "10", events, old).await;
    let pod = machine.pod("old").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    machine.remove_pod(&pod).await;
    assert_eq!(plugin.methods_of(&pod), ["StateChange 1"]);
    assert_eq!(plugin.methods_of(&id), ["StateChange 11"]);
    plugin.leave();
}

pub(crate) async fn a_refusal_by_a_plugin_leaves_nothing(machine: &mut Machine) {
    let refuse = |heard: &crate::plugin::ReceivedCall| {
        let name = heard.about.container.as_ref().map(|container| container.name.clone());
        let pod = heard.about.pod.clone().unwrap_or_default().name;
        match (heard.method.as_str(), name.as_deref()) {
            ("RunPodSandbox", _) if pod == "unwanted" => PluginReply::No("no room for it"),
            ("CreateContainer", Some("unmade")) => PluginReply::No("not that one"),
            ("StartContainer", Some("unstarted")) => PluginReply::No("not now"),
            // Events of past operations cannot be refused.
            ("PostStartContainer" | "StopContainer" | "RemovePodSandbox", _) => PluginReply::No("too late"),
            _ => PluginReply::Yes,
        }
    };
    let plugin = Plugin::join(&machine.path("nri.sock"), "10", refuse).await;
    for _ in 0..2 {
        // The second attempt would find the name in use if anything were left.
        let refused = machine.try_pod("unwanted", |_| {}).await.expect_err("refused");
        assert!(
            refused.message().contains("10-test") && refused.message().contains("no room for it"),
            "{refused}"
        );
    }
    let id = plugin.all("RunPodSandbox")[0].about.pod.clone().unwrap().id;
    assert_eq!(plugin.methods_of(&id), ["RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"]);
    let pod = machine.pod("wanted").await;
    let refused = machine.create(&pod, "unmade", &["true"], |_| {}).await.expect_err("refused");
    assert!(refused.message().contains("not that one"), "{refused}");
    let id = plugin.all("CreateContainer")[0].about.container.clone().unwrap().id;
    assert_eq!(plugin.methods_of(&id), ["CreateContainer", "StopContainer", "RemoveContainer"]);
    let id = machine.create(&pod, "unstarted", &["true"], |_| {}).await.expect("create");
    assert!(machine.try_start(&id).await.expect_err("refused").message().contains("not now"));
    let runs = machine.run(&pod, "runs", &["sleep", "1000"]).await;
    assert!(crate::fixture::alive(machine.pid(&runs).await));
    machine.remove_pod(&pod).await;
    plugin.leave();
}

pub(crate) async fn a_plugin_that_does_not_answer_is_dropped(machine: &mut Machine) {
    // Long enough for a plugin that answers, also on a machine that stalls.
    const SHORT: Duration = Duration::from_secs(3);
    machine.close_runtime().await;
    machine.open_runtime_with(|config| config.nri.request_timeout = SHORT).await;
    let silent = Plugin::join(&machine.path("nri.sock"), "10", |_| PluginReply::Silence).await;
    let well = Plugin::join(&machine.path("nri.sock"), "20", |_| PluginReply::Yes).await;
    let pod = machine.pod("slow").await;
    assert_eq!(silent.methods_of(&pod), ["RunPodSandbox"]);
    silent.connection.closed().await;
    assert_eq!(well.methods_of(&pod), ["RunPodSandbox"]);
    well.leave();
    machine.restart(Duration::ZERO).await;
    let well = Plugin::join(&machine.path("nri.sock"), "20", |_| PluginReply::Yes).await;
    // A plugin that dies during a call does not fail the operation.
    let dying =
        Plugin::join_for(&machine.path("nri.sock"), "05", 1 << (Event::CreateContainer as i32 - 1), |_| {
            PluginReply::Silence
        })
        .await;
    let dies = async {
        eventually_async("the plugin is called", 20, async || !dying.all("CreateContainer").is_empty()).await;
        dying.connection.close();
    };
    tokio::join!(machine.run(&pod, "c", &["sleep", "1000"]), dies);
    machine.remove_pod(&pod).await;
    well.leave();
}
