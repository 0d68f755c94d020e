//! Attach: connects a client to the first process of a container.

use std::sync::LazyLock;

use coracle_proto::cri;

use super::client::{Client, Output, exited, failed};
use super::command_limit;
use super::pump::{End, Pipes, Session, Streams, Target};
use crate::error::Error;
use crate::namespace_limit::{NamespaceLimit, NamespacePermit};
use crate::shim_client::{AttachTo, Attached, Shim};
use crate::tables::Tables;

/// Capacity in bytes of the pipe of an output. The shim drops a client that falls behind by more. The client's pipe stays
/// full until the client has read the rest or disconnects.
const CAPACITY: u32 = 1 << 20;
/// Capacity in bytes of the pipe if the limit of [`LARGE_PIPES`] is reached.
const SMALL_CAPACITY: u32 = 64 << 10;
/// Maximum pipes of full capacity on this node. Their memory counts for the shims, which are outside of the memory limits
/// of their pods.
const LARGE_PIPES: usize = 32;

/// The pipes of full capacity.
static PIPES: LazyLock<NamespaceLimit> = LazyLock::new(|| NamespaceLimit::new(LARGE_PIPES));

/// The capacity of the pipes of one client, while it is attached.
#[derive(Debug)]
struct PipeMemory {
    capacity: u32,
    _permits: Option<Vec<NamespacePermit>>,
}

// === impl PipeMemory ===

impl PipeMemory {
    /// Takes full capacity for this number of pipes of a pod of the namespace. If the limit is reached, the pipes get
    /// the small capacity.
    fn take(limit: &NamespaceLimit, namespace: &str, pipes: usize) -> Self {
        let permits: Option<Vec<_>> = (0..pipes).map(|_| limit.take(namespace)).collect();
        let capacity = if permits.is_some() { CAPACITY } else { SMALL_CAPACITY };
        Self { capacity, _permits: permits }
    }
}

/// Attaches a client to a container until the container ends.
pub(super) async fn attach(tables: &Tables, request: cri::AttachRequest, client: Client) {
    let output = client.output.clone();
    let status = match attach_until_end(tables, &request, client).await {
        Ok(true) => exited(0),
        Ok(false) => return,
        Err(error) => failed(&error.chain()),
    };
    let _gone = output.send(Output::Status(status)).await;
}

/// Returns true if the container ended or the client has closed its input, and false if the client disconnected.
async fn attach_until_end(
    tables: &Tables,
    request: &cri::AttachRequest,
    client: Client,
) -> Result<bool, Error> {
    let container = tables.running(&request.container_id)?;
    let _permit = command_limit::take(tables, &container)?;
    let sandbox = tables.sandbox(&container.record.sandbox_id)?;
    let pipes = usize::from(request.stdout) + usize::from(request.stderr);
    let memory = PipeMemory::take(&PIPES, sandbox.namespace(), pipes);
    let to = AttachTo {
        stdin: request.stdin,
        stdout: request.stdout,
        stderr: request.stderr,
        output_capacity: memory.capacity,
    };
    let shim = sandbox.shim()?;
    let attached = shim.attach(&container.id, to).await.map_err(Error::shim("attach to the container"))?;
    // A container with a terminal has a socket in place of the pipes.
    let _memory = attached.terminal.is_none().then_some(memory);
    let streams = match attached {
        Attached { terminal: Some(terminal), .. } => Streams::of_terminal(terminal, request.stdin)?,
        Attached { stdin, stdout, stderr, .. } => Streams::of_pipes(Pipes { stdin, stdout, stderr })?,
    };
    let config = &container.record.config;
    let target = Target {
        tables,
        container_id: &container.id,
        terminal: None,
        // A client that only reads does not close standard input when it disconnects.
        stdin_once: request.stdin && config.stdin_once,
        detaches: request.stdin && (config.tty || !config.stdin_once),
    };
    let exit = async {
        container.wait_exited().await;
        Some(0)
    };
    let is_too_slow = is_dropped(&shim, &container.id, to);
    let session = Session { target, streams, client, early: Vec::new() };
    match session.pump(exit, is_too_slow).await {
        End::ClientGone => Ok(false),
        End::Command(_) | End::Detached => Ok(true),
        End::TooSlow => Err(Error::TooSlow),
    }
}

/// Whether the container still has outputs although they ended for this client. Then the shim has dropped the client,
/// because a container does not wait for slow clients. The shim answers a new attach with the outputs that are open.
async fn is_dropped(shim: &Shim, container_id: &str, to: AttachTo) -> bool {
    let again = shim.attach(container_id, AttachTo { stdin: false, ..to }).await;
    // A container that is about to end refuses the attach.
    again.is_ok_and(|open| open.terminal.is_some() || open.stdout.is_some() || open.stderr.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pipes_of_attached_clients_share_a_bounded_memory() {
        let limit = NamespaceLimit::new(4);
        let client = |namespace, pipes| PipeMemory::take(&limit, namespace, pipes);
        let (first, second, other) = (client("a", 2), client("a", 2), client("b", 1));
        let capacities = [&first, &second, &other].map(|memory| memory.capacity);
        assert_eq!(capacities, [CAPACITY, SMALL_CAPACITY, CAPACITY]);
        assert_eq!(client("b", 1).capacity, SMALL_CAPACITY);
        assert_eq!(client("a", 0).capacity, CAPACITY, "input alone needs no memory");
        drop((first, second, other));
        assert_eq!(client("a", 2).capacity, CAPACITY);
    }
}
