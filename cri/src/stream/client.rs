//! A client of exec or attach, independent of the transport: its messages, and the status that it gets.

use bytes::Bytes;
use serde_json::json;
use tokio::sync::mpsc;

use super::queue::{QueueMemory, QueueReceiver, QueueSender, Size, queue};

/// Maximum bytes of a client's messages that wait for its command. One user can have hundreds of clients.
pub(super) const INPUT_MEMORY: u32 = 64 << 10;

/// A message from a client. The channel closes when the client disconnects.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    Stdin(Bytes),
    StdinClosed,
    Resize { width: u16, height: u16 },
}

/// A message to a client. The status is the last message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Output {
    Stdout(Bytes),
    Stderr(Bytes),
    Status(Bytes),
}

/// The channels between a transport and a command.
#[derive(Debug)]
pub(super) struct Client {
    pub(super) input: QueueReceiver<Input>,
    pub(super) output: mpsc::Sender<Output>,
}

/// The queue of a client's messages to its command.
pub(super) fn input_queue() -> (QueueSender<Input>, QueueReceiver<Input>) {
    queue(&QueueMemory::new(INPUT_MEMORY))
}

// === impl Input ===

impl Size for Input {
    fn bytes(&self) -> usize {
        match self {
            Self::Stdin(bytes) => bytes.len(),
            Self::StdinClosed | Self::Resize { .. } => 0,
        }
    }
}

/// The status of a command that exited.
pub(super) fn exited(code: i32) -> Bytes {
    let status = if code == 0 {
        json!({ "metadata": {}, "status": "Success" })
    } else {
        json!({
            "metadata": {},
            "status": "Failure",
            "message": format!("command terminated with non-zero exit code: {code}"),
            "reason": "NonZeroExitCode",
            "details": { "causes": [{ "reason": "ExitCode", "message": code.to_string() }] },
        })
    };
    Bytes::from(status.to_string())
}

/// The status of a command that could not run.
pub(super) fn failed(message: &str) -> Bytes {
    let status = json!({
        "metadata": {},
        "status": "Failure",
        "message": format!("Internal error occurred: {message}"),
        "reason": "InternalError",
        "details": { "causes": [{ "message": message }] },
        "code": 500,
    });
    Bytes::from(status.to_string())
}

/// Parses a terminal size. Clients write the field names with capital letters.
pub(super) fn resize(text: &[u8]) -> Option<Input> {
    let size: serde_json::Value = serde_json::from_slice(text).ok()?;
    let side = |name: &str| size.get(name)?.as_u64().and_then(|side| u16::try_from(side).ok());
    Some(Input::Resize { width: side("Width")?, height: side("Height")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_code_is_a_cause_of_the_status() {
        let status: serde_json::Value = serde_json::from_slice(&exited(7)).expect("json");
        assert_eq!(status["reason"], "NonZeroExitCode");
        assert_eq!(status["details"]["causes"][0], json!({"reason": "ExitCode", "message": "7"}));
        assert_eq!(exited(0), Bytes::from(r#"{"metadata":{},"status":"Success"}"#));
    }

    #[test]
    fn terminal_sizes_of_clients_are_parsed() {
        assert_eq!(resize(b"{\"Width\":80,\"Height\":24}\n"), Some(Input::Resize { width: 80, height: 24 }));
        assert_eq!(resize(b"{\"Width\":-1,\"Height\":24}"), None);
        assert_eq!(resize(b"?"), None);
    }
}
