//! Registration of plugins.

use std::os::fd::FromRawFd;
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;
use std::time::Duration;

use coracle_proto::nri::{ContainerAdjustment, KeyValue};
use tokio::net::UnixStream;

use crate::fixture::Machine;
use crate::plugin::{Plugin, PluginReply};

pub(crate) async fn a_late_plugin_is_synchronized(machine: &mut Machine) {
    let pod = machine.pod("known").await;
    let runs = machine.run(&pod, "runs", &["sleep", "1000"]).await;
    let ended = machine.run(&pod, "ended", &["true"]).await;
    machine.wait_exited(&ended).await;
    for restarted in [false, true] {
        if restarted {
            machine.restart(Duration::ZERO).await;
        }
        let plugin = Plugin::join(&machine.path("nri.sock"), "10", |_| PluginReply::Yes).await;
        let known = plugin.known();
        assert_eq!(known.pods.iter().map(|pod| &pod.id).collect::<Vec<_>>(), [&pod]);
        assert_eq!(known.containers.iter().map(|container| &container.id).collect::<Vec<_>>(), [&runs]);
        assert_eq!(known.containers[0].args, ["sleep", "1000"]);
        assert_eq!(i32::try_from(known.containers[0].pid), Ok(machine.pid(&runs).await));
        if restarted {
            machine.remove_pod(&pod).await;
            assert_eq!(plugin.methods_of(&runs), ["StopContainer", "RemoveContainer"]);
            assert_eq!(plugin.methods_of(&ended), ["RemoveContainer"]);
            assert_eq!(plugin.methods_of(&pod), ["StopPodSandbox", "RemovePodSandbox"]);
        }
        plugin.leave();
    }
}

pub(crate) async fn a_plugin_with_an_invalid_name_is_refused(machine: &mut Machine) {
    let stream = UnixStream::connect(machine.path("nri.sock")).await.expect("connect");
    let plugin = Plugin::speak(stream, 0, |_| PluginReply::Yes);
    // The runtime does not have to answer, but it closes the connection at once.
    let _heard = plugin.register("1", "test").await;
    tokio::time::timeout(Duration::from_secs(60), plugin.connection.closed()).await.expect("disconnected");
}

pub(crate) async fn a_preinstalled_plugin_is_started_with_the_runtime(machine: &mut Machine) {
    let (plugins, configs) = (machine.path("plugins"), machine.path("plugins.d"));
    std::fs::create_dir_all(&plugins).expect("directory");
    std::fs::create_dir_all(&configs).expect("directory");
    let program = plugins.join("05-own");
    let own = std::env::current_exe().expect("the path of this program");
    std::fs::write(&program, format!("#!/bin/sh\nexec {} plugin\n", own.display())).expect("program");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("mode");
    std::fs::write(configs.join("own.conf"), "configured").expect("configuration");
    machine.restart(Duration::ZERO).await;
    let pod = machine.pod("own").await;
    let id = machine.run(&pod, "c", &["sleep", "1000"]).await;
    let answer = machine.exec(&id, &["sh", "-c", "echo $OWN"], 0).await.expect("exec");
    assert_eq!(String::from_utf8_lossy(&answer.stdout).trim(), "05-own configured");
    machine.remove_pod(&pod).await;
    std::fs::remove_file(program).expect("remove");
    machine.restart(Duration::ZERO).await;
}

/// The plugin that the runtime starts. An environment variable has the number of its socket's descriptor.
#[allow(unsafe_code, reason = "takes a descriptor by its number")]
pub(crate) fn preinstalled() -> ExitCode {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (index, name) = (variable("NRI_PLUGIN_IDX"), variable("NRI_PLUGIN_NAME"));
    let fd = variable("NRI_PLUGIN_SOCKET").parse().expect("a descriptor");
    // SAFETY: only this code uses the descriptor; the program has not opened any other.
    let stream = unsafe { std::os::unix::net::UnixStream::from_raw_fd(fd) };
    stream.set_nonblocking(true).expect("socket");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    runtime.block_on(async {
        let full = format!("{index}-{name}");
        let plugin = Plugin::speak(UnixStream::from_std(stream).expect("socket"), 0, move |heard| {
            if heard.method != "CreateContainer" {
                return PluginReply::Yes;
            }
            let variable = KeyValue { key: "OWN".into(), value: format!("{full} {}", heard.config) };
            PluginReply::adjust(ContainerAdjustment { env: vec![variable], ..Default::default() })
        });
        plugin.register(&index, &name).await.expect("register");
        plugin.synchronized().await;
        plugin.connection.closed().await;
    });
    ExitCode::SUCCESS
}
