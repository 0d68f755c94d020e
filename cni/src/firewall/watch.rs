//! Detection of foreign changes of our table: the kernel notifies each change of nftables with its author.

use coracle_nft::{Channel, changes};

impl super::Firewall {
    /// Whether another process changed one of our tables: the firewall's table, the guard's table of the same name, or
    /// the table `beside`. `others` has the authors of the guard's table and of the table `beside`.
    pub(crate) fn is_foreign(&self, events: &[u8], beside: Option<&str>, others: [Option<u32>; 2]) -> bool {
        let state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let is_own = |author| state.channel.as_ref().map(Channel::port) == author || others.contains(&author);
        let mut changes = changes(events);
        changes.any(|change| {
            (change.table == self.table || beside == Some(change.table)) && !is_own(Some(change.author))
        })
    }
}
