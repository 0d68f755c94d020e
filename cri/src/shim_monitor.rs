//! The shim monitor: one task per shim records the shim's events, then acknowledges them. It reconnects lost connections
//! and cleans up after a dead shim.

mod phase;
mod reconnect;
mod silent;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, Weak};

use coracle_cni::Network;
use coracle_proto::shim::Event;
use futures::StreamExt as _;
use tracing::{debug, warn};

pub(crate) use self::phase::{MissedTransition, current_phase, missed_transitions};
use self::reconnect::{ReconnectBackoff, reconnect};
use crate::container::Container;
use crate::error::Error;
use crate::exec_killer::ExecKiller;
use crate::exit_recorder::{ExitRecorder, exit_record};
use crate::lock::locked;
use crate::nri::PluginHooks;
use crate::records::{ExitRecord, Records, SandboxRecord};
use crate::sandbox::{LiveShim, Sandbox, SandboxState, process1};
use crate::shim_client::{Closed, ErrorKind, Shim};
use crate::tables::Tables;

/// Monitors the shims of all pods.
#[derive(Clone)]
pub(crate) struct ShimMonitor {
    state: Arc<State>,
}

/// The state of the monitor. Its tasks hold weak references, so that they do not keep the runtime alive.
pub(crate) struct State {
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) network: Network,
    pub(crate) hooks: PluginHooks,
    pub(crate) exits: ExitRecorder,
    pub(crate) exec_killer: ExecKiller,
}

/// Handled events of one connection. An acknowledgement covers all events up to a number, so an event that takes long
/// holds back the acknowledgement of later events.
#[derive(Debug, Default)]
struct Acknowledgements {
    open: BTreeSet<u64>,
    last: u64,
}

/// One connection to the shim of a sandbox.
#[derive(Clone)]
struct Connection {
    sandbox: Arc<Sandbox>,
    shim: Shim,
    acknowledgements: Arc<Mutex<Acknowledgements>>,
}

// === impl ShimMonitor ===

impl ShimMonitor {
    pub(crate) fn new(state: State) -> Self {
        Self { state: Arc::new(state) }
    }

    /// Adds a sandbox with a live shim to the table and monitors the shim.
    pub(crate) fn adopt_sandbox(&self, record: SandboxRecord, live: LiveShim) -> Arc<Sandbox> {
        let (shim, watched) = (live.shim.clone(), live.clone());
        let sandbox = Arc::new(Sandbox::new(record, SandboxState::Ready(live)));
        process1::watch(&sandbox, &watched);
        self.state.tables.sandboxes.insert(&sandbox.id, Arc::clone(&sandbox));
        self.listen(Arc::clone(&sandbox), shim);
        sandbox
    }

    /// Handles a shim's events until the shim ends. A lost connection is replaced by a new one.
    fn listen(&self, sandbox: Arc<Sandbox>, shim: Shim) {
        coracle_threads::spawn(monitor(Arc::downgrade(&self.state), sandbox, shim));
    }

    /// Handles one event. If the container is being started or updated, a separate task records its end afterwards, so
    /// that events of other containers do not wait. Events of one container stay in order, because its end is its last
    /// event.
    async fn handle(&self, connection: &Connection, event: Event) {
        let sequence = event.sequence;
        locked(&connection.acknowledgements).begin(sequence);
        let Some(exit) = event.exited else {
            // An event kind of a later version: nothing to record.
            return connection.acknowledge(sequence, Ok(())).await;
        };
        if !event.exec_id.is_empty() {
            connection.sandbox.exec_exited(&event.exec_id, exit);
            return connection.acknowledge(sequence, Ok(())).await;
        }
        let Some(container) = self.state.tables.containers.get(&event.container_id) else {
            return connection.acknowledge(sequence, Ok(())).await;
        };
        let record = exit_record(&container, &exit);
        let recorded = match container.starting.try_lock() {
            Ok(_started) => self.state.exits.record_exit(&container, record),
            Err(_busy) => return self.record_later(connection, sequence, Arc::clone(&container), record),
        };
        connection.acknowledge(sequence, recorded).await;
    }

    /// Records the end of a busy container in a task.
    fn record_later(
        &self,
        connection: &Connection,
        sequence: u64,
        container: Arc<Container>,
        record: ExitRecord,
    ) {
        let (exits, connection) = (self.state.exits.clone(), connection.clone());
        coracle_threads::spawn(async move {
            let recorded = exits.record_exit_after_start(&container, record).await;
            connection.acknowledge(sequence, recorded).await;
        });
    }

    /// Cleans up after an unexpected exit of a shim. The pod's processes still run, so they are killed through their
    /// cgroups.
    async fn shim_exited(&self, sandbox: &Sandbox) {
        if sandbox.take_shim().is_none() {
            return;
        }
        let state = &self.state;
        warn!(sandbox = sandbox.id, "a shim ended unexpectedly, ending its pod");
        sandbox.forget_all_execs();
        for container in state.tables.containers_of(&sandbox.id) {
            state.exits.end_lost_container(&container).await;
        }
        state.hooks.stop_pod_sandbox(sandbox).await;
        if let Err(source) = state.network.del(&sandbox.id).await {
            warn!(
                sandbox = sandbox.id,
                error = source.chain(),
                "cannot remove the network of a pod whose shim has ended, retrying"
            );
            state.network.del_later(&sandbox.id);
        }
        // A removal in progress must finish first: writing the record would create the directory again.
        let _guard = sandbox.ending.lock().await;
        if state.tables.sandboxes.get(&sandbox.id).is_some() {
            state.exits.record_sandbox_end(sandbox);
        }
    }
}

/// Monitors one shim until it ends or the runtime ends.
async fn monitor(state: Weak<State>, sandbox: Arc<Sandbox>, mut shim: Shim) {
    let mut backoff = ReconnectBackoff::new();
    loop {
        let Some(mut events) = shim.events() else { return };
        let connection = Connection {
            sandbox: Arc::clone(&sandbox),
            shim: shim.clone(),
            acknowledgements: Arc::default(),
        };
        while let Some(event) = events.next().await {
            let Some(state) = state.upgrade() else { return };
            // This future and those below are boxed: each pod has a monitor, which mostly waits and must need little memory.
            Box::pin(ShimMonitor { state }.handle(&connection, event)).await;
        }
        if matches!(shim.closed().await, Closed::Exited) {
            break;
        }
        report_lost_connection(&sandbox);
        let Some(next) = Box::pin(connect_again(&state, &sandbox, &shim, &mut backoff)).await else {
            // The shim's process may end later, because the kernel may wait for a disk when it closes the shim's files.
            shim.ended().await;
            break;
        };
        shim = next;
    }
    let Some(state) = state.upgrade() else { return };
    Box::pin(ShimMonitor { state }.shim_exited(&sandbox)).await;
}

/// Logs the end of a connection to a shim whose process still runs. This is expected from a shim that is ending. It
/// closes its connection first, and its process may end seconds later if many pods are removed at the same time.
fn report_lost_connection(sandbox: &Sandbox) {
    if sandbox.is_over() {
        debug!(sandbox = sandbox.id, "an ending shim closed its connection");
    } else {
        warn!(sandbox = sandbox.id, "the connection to a live shim ended");
    }
}

/// Reconnects to a live shim and applies the transitions that the runtime missed. `None` if the pod, the runtime or the
/// shim is ending.
async fn connect_again(
    state: &Weak<State>,
    sandbox: &Arc<Sandbox>,
    shim: &Shim,
    backoff: &mut ReconnectBackoff,
) -> Option<Shim> {
    let (shim, shim_state) = reconnect(shim, sandbox, backoff, || state.strong_count() == 0).await?;
    let monitor = ShimMonitor { state: state.upgrade()? };
    monitor.shim_linked(sandbox, &shim, shim_state).await.then_some(shim)
}

// === impl Connection ===

impl Connection {
    /// Acknowledges handled events to the shim. An exit that could not be recorded is not acknowledged. The shim sends
    /// it again to the next runtime, unless a later exit is recorded and acknowledged.
    async fn acknowledge(&self, sequence: u64, recorded: Result<(), Error>) {
        let all = locked(&self.acknowledgements).done(sequence);
        let shim = &self.shim;
        if let Err(error) = recorded {
            warn!(dir = %shim.dir().display(), error = error.chain(), "cannot record an exit");
            return;
        }
        // A shim that is shutting down is not an error.
        if let Err(error) = shim.acknowledge(all).await
            && error.kind != ErrorKind::Gone
        {
            warn!(dir = %shim.dir().display(), %error, "cannot acknowledge an exit");
        }
    }
}

// === impl Acknowledgements ===

impl Acknowledgements {
    fn begin(&mut self, sequence: u64) {
        self.open.insert(sequence);
        self.last = self.last.max(sequence);
    }

    /// The number up to which all events are handled.
    fn done(&mut self, sequence: u64) -> u64 {
        self.open.remove(&sequence);
        self.open.first().map_or(self.last, |open| open.saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use coracle_proto::cri;
    use tracing::Level;

    use super::*;
    use crate::records::SandboxPhase;

    #[test]
    fn the_end_of_a_connection_is_no_warning_while_the_pod_is_being_removed() {
        let record = SandboxRecord {
            version: 1,
            id: "pod".to_owned(),
            phase: SandboxPhase::Ready,
            runtime_handler: String::new(),
            created_at: 0,
            config: cri::PodSandboxConfig::default(),
            addresses: Vec::new(),
            selinux: None,
            restoring: false,
            stopping: true,
            transitions: Vec::new(),
        };
        // The stop of the sandbox has already taken its shim.
        let sandbox = Sandbox::new(record, SandboxState::NotReady);
        let has_warned = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&has_warned);
        let writer = move || {
            flag.store(true, Ordering::Relaxed);
            std::io::sink()
        };
        let log = tracing_subscriber::fmt().with_max_level(Level::WARN).with_writer(writer).finish();
        tracing::subscriber::with_default(log, || report_lost_connection(&sandbox));
        assert!(!has_warned.load(Ordering::Relaxed));
    }

    #[test]
    fn a_waiting_monitor_takes_little_memory() {
        fn size<A, B, C, F: Future>(_: impl Fn(A, B, C) -> F) -> usize {
            size_of::<F>()
        }
        let size = size(monitor);
        assert!(size <= 1536, "each pod has a monitor of {size} bytes");
    }

    #[test]
    fn a_slow_event_holds_back_the_acknowledgement_of_later_events() {
        let mut acknowledgements = Acknowledgements::default();
        [1, 2, 3].into_iter().for_each(|sequence| acknowledgements.begin(sequence));
        assert_eq!(acknowledgements.done(1), 1);
        assert_eq!(acknowledgements.done(3), 1);
        assert_eq!(acknowledgements.done(2), 3);
    }
}
