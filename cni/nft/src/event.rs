//! Notifications of nftables changes: table and author.

use super::message::{BODY, attributes, kind_of, messages};

/// `NFNL_SUBSYS_NFTABLES`, part of the message type.
const SUBSYSTEM: u8 = 10;
/// `NFT_MSG_NEWGEN`: ends a transaction, belongs to no table.
const NEW_GENERATION: u8 = 15;
/// Attribute with the table's name, in all messages about tables.
const TABLE: u16 = 1;

/// A change of a table or of its content.
#[derive(Debug, PartialEq, Eq)]
pub struct Change<'a> {
    /// The table.
    pub table: &'a str,
    /// The netlink port of the socket that made the change.
    pub author: u32,
}

/// The changes in a datagram.
pub fn changes(events: &[u8]) -> impl Iterator<Item = Change<'_>> {
    messages(events).filter_map(change)
}

fn change(message: &[u8]) -> Option<Change<'_>> {
    let [verb, subsystem] = kind_of(message).to_le_bytes();
    if subsystem != SUBSYSTEM || verb == NEW_GENERATION {
        return None;
    }
    let author = u32::from_ne_bytes(message.get(12..16)?.try_into().ok()?);
    let (_, table) = attributes(message.get(BODY..)?).find(|(kind, _)| *kind == TABLE)?;
    Some(Change { table: std::str::from_utf8(table).ok()?.trim_end_matches('\0'), author })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(verb: u8, author: u32, attributes: &[u8]) -> Vec<u8> {
        let length = u32::try_from(20 + attributes.len()).unwrap();
        let mut bytes = length.to_ne_bytes().to_vec();
        bytes.extend_from_slice(&[verb, SUBSYSTEM, 0, 0, 0, 0, 0, 0]);
        bytes.extend_from_slice(&author.to_ne_bytes());
        bytes.extend_from_slice(&[1, 0, 0, 0]);
        bytes.extend_from_slice(attributes);
        bytes
    }

    #[test]
    fn changes_name_table_and_author() {
        let table = [&7u16.to_ne_bytes()[..], &1u16.to_ne_bytes(), b"ab\0\0"].concat();
        let bytes = [message(2, 9, &table), message(NEW_GENERATION, 9, &table)].concat();
        assert_eq!(changes(&bytes).collect::<Vec<_>>(), [Change { table: "ab", author: 9 }]);
    }

    #[test]
    fn incomplete_messages_are_not_changes() {
        let table = [&7u16.to_ne_bytes()[..], &1u16.to_ne_bytes(), b"ab\0\0"].concat();
        let bytes = message(2, 9, &table);
        for end in 0..bytes.len() - 4 {
            assert_eq!(changes(&bytes[..end]).count(), 0);
        }
        assert_eq!(changes(&[0; 40]).count(), 0);
    }
}
