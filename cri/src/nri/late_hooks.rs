//! The OCI hooks poststart and poststop, run by the runtime.
//!
//! The container library has exited before these hooks run: poststart runs after the program started, poststop after
//! the container is deleted. They run in the runtime's own namespaces, with the container's state on their standard
//! input (OCI runtime specification, "POSIX-platform Hooks").

use std::process::Stdio;
use std::time::Duration;

use coracle_cni::ProcessGroup;
use oci_spec::runtime::{Hook, Spec};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;
use tracing::warn;

use super::PluginHooks;
use crate::container::Container;
use crate::error::Error;

/// Timeout of a hook without a timeout of its own. The CRI call waits for the hook.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

/// Whether a spec has poststart or poststop hooks.
pub(super) fn any(spec: &Spec) -> bool {
    spec.hooks().as_ref().is_some_and(|hooks| {
        let some = |hooks: &Option<Vec<Hook>>| hooks.as_ref().is_some_and(|hooks| !hooks.is_empty());
        some(hooks.poststart()) || some(hooks.poststop())
    })
}

impl PluginHooks {
    /// Runs the poststart hooks. A failed hook fails the start and kills the container, as the specification requires.
    pub(crate) async fn run_poststart_hooks(&self, container: &Container) -> Result<(), Error> {
        if !container.record.late_hooks {
            return Ok(());
        }
        let hooks = self.spec_of(&container.id).hooks().clone().unwrap_or_default();
        for hook in hooks.poststart().iter().flatten() {
            if let Err(why) = run(hook, &self.oci_state(container, "running")).await {
                if let Ok(shim) = self.tables.shim_of(container) {
                    // An error means that the container has already ended.
                    let _gone = shim.kill(&container.id, libc::SIGKILL).await;
                }
                return Err(Error::invalid("poststart hook", why));
            }
        }
        Ok(())
    }

    /// Runs the poststop hooks. Their failures are logged: the container is already deleted.
    pub(crate) async fn run_poststop_hooks(&self, container: &Container) {
        if !container.record.late_hooks {
            return;
        }
        let hooks = self.spec_of(&container.id).hooks().clone().unwrap_or_default();
        for hook in hooks.poststop().iter().flatten() {
            if let Err(why) = run(hook, &self.oci_state(container, "stopped")).await {
                warn!(container = container.id, why, "a poststop hook failed");
            }
        }
    }

    fn oci_state(&self, container: &Container, status: &str) -> String {
        let annotations = self.spec_of(&container.id).annotations().clone().unwrap_or_default();
        serde_json::json!({
            "ociVersion": "1.2.0",
            "id": container.id,
            "status": status,
            "pid": if status == "running" { container.pid() } else { 0 },
            "bundle": self.records.container_dir(&container.id),
            "annotations": annotations,
        })
        .to_string()
    }
}

async fn run(hook: &Hook, state: &str) -> Result<(), String> {
    let path = hook.path();
    let named = |what: &str| format!("{}: {what}", path.display());
    let args = hook.args().clone().unwrap_or_default();
    let mut command = Command::new(path);
    if let Some((name, args)) = args.split_first() {
        command.arg0(name).args(args);
    }
    let variables = hook.env().iter().flatten().filter_map(|entry| entry.split_once('='));
    command.env_clear().envs(variables).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    coracle_open_files::restore_limit(command.as_std_mut());
    command.process_group(0).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| named(&error.to_string()))?;
    // The group is dropped before the child, see `ProcessGroup`.
    let group = ProcessGroup::of(&child);
    let limit = hook
        .timeout()
        .and_then(|seconds| u64::try_from(seconds).ok())
        .map_or(DEFAULT_TIMEOUT, Duration::from_secs);
    let ended = async {
        if let Some(mut stdin) = child.stdin.take() {
            // A hook may ignore its standard input.
            let _unread = stdin.write_all(state.as_bytes()).await;
        }
        child.wait().await
    };
    let ended = timeout(limit, ended).await;
    if matches!(ended, Ok(Ok(_))) {
        group.ended();
    }
    match ended {
        Err(_late) => Err(named(&format!("did not end within {limit:?}"))),
        Ok(Err(error)) => Err(named(&error.to_string())),
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(named(&status.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(script: &str, seconds: i64) -> Hook {
        let mut hook = Hook::default();
        hook.set_path("/bin/sh".into());
        hook.set_args(Some(vec!["sh".into(), "-c".into(), script.into()]));
        hook.set_env(Some(vec!["PATH=/bin".into(), "WANT=state".into()]));
        hook.set_timeout(Some(seconds));
        hook
    }

    #[tokio::test]
    async fn a_hook_reads_the_state_and_its_exit_code_decides() {
        run(&hook("read it && [ \"$it\" = \"$WANT\" ]", 5), "state\n").await.expect("hook");
        assert!(run(&hook("exit 3", 5), "").await.expect_err("failed").contains("3"));
        assert!(run(&hook("sleep 9", 0), "").await.expect_err("late").contains("within"));
        let mut absent = Hook::default();
        absent.set_path("/no/such".into());
        assert!(run(&absent, "").await.is_err());
    }

    #[tokio::test]
    async fn a_late_hook_is_killed_with_its_children() {
        let dir = tempfile::tempdir().expect("directory");
        let file = dir.path().join("child");
        let script = format!("sleep 1000 & echo $! >{}; wait", file.display());
        let mut text = String::new();
        // On a busy machine, a hook may reach the first limits before it starts its child.
        for seconds in [1, 4, 16, 64] {
            assert!(run(&hook(&script, seconds), "").await.expect_err("late").contains("within"));
            text = std::fs::read_to_string(&file).unwrap_or_default();
            if text.ends_with('\n') {
                break;
            }
        }
        let child: i32 = text.trim().parse().expect("a pid");
        // An error means that the process has ended.
        let Ok(child) = crate::pidfd::open(child) else { return };
        let child = crate::pidfd::watch(child).expect("watch");
        let ended = timeout(Duration::from_secs(60), child.readable()).await;
        assert!(ended.is_ok(), "the child of the hook is killed");
    }
}
