//! Process 1 of a pod with a shared pid namespace: its end is the end of the pod.
//!
//! A shim ends its pod when process 1 has ended. A shim of an earlier version does not: then the runtime ends the shim.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use super::{LiveShim, Sandbox};
use crate::pidfd;
use crate::shim_client::Shim;

/// Time for a shim to end on its own: it kills the pod's processes and reads their last output.
const EXIT_GRACE: Duration = Duration::from_secs(3);

/// Starts a task that ends the shim when process 1 of its pod has ended. The task does not use the runtime, and ends
/// with the shim.
pub(crate) fn watch(sandbox: &Arc<Sandbox>, live: &LiveShim) {
    let (pid, shim) = (live.init_pid, live.shim.clone());
    if pid == 0 || sandbox.mark_process1_watched() {
        return;
    }
    let id = sandbox.id.clone();
    coracle_threads::spawn(async move {
        tokio::select! {
            // Cancel safe: both arms only wait.
            () = shim.ended() => return,
            () = ended(pid, &shim) => {}
        }
        warn!(sandbox = id, pid, "process 1 of a pod has ended");
        if timeout(EXIT_GRACE, shim.ended()).await.is_ok() {
            return;
        }
        if let Err(error) = shim.kill_shim().await {
            warn!(sandbox = id, %error, "cannot end the shim of a pod without process 1");
        }
    });
}

/// Waits until process 1 has ended. A process that cannot be watched counts as alive, because the shim watches it as
/// well.
async fn ended(pid: i32, shim: &Shim) {
    let waited = match process(pid, shim) {
        Ok(process) => process.ended().await,
        Err(error) => Err(error),
    };
    match waited {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            warn!(pid, %error, "cannot watch process 1 of a pod");
            std::future::pending().await
        }
        Ok(()) | Err(_) => {}
    }
}

/// Opens process 1 of a shim's pod, or a container's first process. Both are children of the shim.
pub(crate) fn process(pid: i32, shim: &Shim) -> std::io::Result<pidfd::Process> {
    pidfd::Process::child_of(pid, shim.pid())
}
