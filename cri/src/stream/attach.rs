//! Attach: connects a client to the first process of a container.

use coracle_proto::cri;

use super::client::{Client, Output, exited, failed};
use super::pump::{End, Pipes, Session, Streams, Target};
use crate::error::Error;
use crate::shim_client::{AttachTo, Attached, Shim};
use crate::tables::Tables;

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

/// True if the container ended, false if the client disconnected.
async fn attach_until_end(
    tables: &Tables,
    request: &cri::AttachRequest,
    client: Client,
) -> Result<bool, Error> {
    let container = tables.running(&request.container_id)?;
    let to = AttachTo { stdin: request.stdin, stdout: request.stdout, stderr: request.stderr };
    let shim = tables.shim_of(&container)?;
    let attached = shim.attach(&container.id, to).await.map_err(Error::shim("attach to the container"))?;
    let streams = match attached {
        Attached { terminal: Some(terminal), .. } => Streams::of_terminal(terminal, request.stdin)?,
        Attached { stdin, stdout, stderr, .. } => Streams::of_pipes(Pipes { stdin, stdout, stderr })?,
    };
    let target = Target {
        tables,
        container_id: &container.id,
        terminal: None,
        // The end of a client that only reads does not close it.
        stdin_once: request.stdin && container.record.config.stdin_once,
    };
    let exit = async {
        container.wait_exited().await;
        Some(0)
    };
    let is_too_slow = is_dropped(&shim, &container.id, to);
    let session = Session { target, streams, client, early: Vec::new() };
    match session.pump(exit, is_too_slow).await {
        End::ClientGone => Ok(false),
        End::Command(_) => Ok(true),
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
