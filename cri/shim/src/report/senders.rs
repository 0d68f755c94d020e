//! Checks which process may send which message of a report. No I/O.
//!
//! The first sender is the child that the shim forked. Its messages may name a successor and the first process. Then
//! these processes may send messages, too. Only the first message of each kind counts. Causes are an exception: they
//! are accepted from every process, and all of them count.

use std::mem::{Discriminant, discriminant};

use super::Message;

/// Maximum number of messages kept from senders that are not named yet. The kernel does not order messages of
/// two processes.
const MAX_EARLY: usize = 8;

/// The permitted senders of one report.
#[derive(Debug, Default)]
pub(super) struct Senders {
    senders: Vec<i32>,
    received_kinds: Vec<Discriminant<Message>>,
    early: Vec<(i32, Message)>,
}

// === impl Senders ===

impl Senders {
    pub(super) fn expect(&mut self, pid: i32) {
        self.senders.push(pid);
    }

    /// Returns the messages to accept now: this message, and earlier messages of the process that this message names.
    pub(super) fn admit(&mut self, sender: i32, message: Message) -> Vec<Message> {
        // Processes of the container library log causes before a message names them. A cause only extends the
        // text of an error.
        if matches!(message, Message::Cause(_)) {
            return vec![message];
        }
        if !self.senders.contains(&sender) {
            if self.early.len() < MAX_EARLY {
                self.early.push((sender, message));
            }
            return Vec::new();
        }
        let kind = discriminant(&message);
        if self.received_kinds.contains(&kind) {
            return Vec::new();
        }
        self.received_kinds.push(kind);
        let named = match message {
            Message::Successor(pid) | Message::Pid(pid) => pid,
            message => return vec![message],
        };
        self.expect(named);
        let early = std::mem::take(&mut self.early);
        let mut admitted: Vec<Message> = vec![message];
        for (sender, message) in early {
            admitted.append(&mut self.admit(sender, message));
        }
        admitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_count_once_and_from_permitted_processes_only() {
        let mut senders = Senders::default();
        senders.expect(10);
        assert_eq!(senders.admit(11, Message::Pid(12)), []);
        assert_eq!(senders.admit(12, Message::Ready), []);
        assert_eq!(senders.admit(99, Message::SharesPids), []);
        let all = [Message::Successor(11), Message::Pid(12), Message::Ready];
        assert_eq!(senders.admit(10, Message::Successor(11)), all);
        assert_eq!(senders.admit(10, Message::Pid(1)), []);
        assert_eq!(senders.admit(12, Message::Successor(99)), []);
        assert_eq!(senders.admit(99, Message::SharesPids), []);
    }

    #[test]
    fn unknown_senders_cannot_fill_memory() {
        let mut senders = Senders::default();
        (0..1000).for_each(|_| assert_eq!(senders.admit(99, Message::Ready), []));
        assert_eq!(senders.early.len(), MAX_EARLY);
    }
}
