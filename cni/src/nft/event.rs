//! What the kernel tells of changes: which table, and by whose socket.

/// `NFNL_SUBSYS_NFTABLES`, of a message's type.
const SUBSYSTEM: u8 = 10;
/// `NFT_MSG_NEWGEN`: it ends a transaction and is of no table.
const NEW_GENERATION: u8 = 15;
/// In every message that is of a table, the table's name.
const TABLE: u16 = 1;

/// A change of a table, or of anything in it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Change<'a> {
    pub(crate) table: &'a str,
    /// The port of the socket that asked for it.
    pub(crate) author: u32,
}

/// The changes that a datagram tells of.
pub(crate) fn changes(mut rest: &[u8]) -> impl Iterator<Item = Change<'_>> {
    std::iter::from_fn(move || {
        loop {
            let length = number(rest.get(..4)?)? as usize;
            let message = rest.get(..length).filter(|_| length >= 20)?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            if let Some(change) = change(message) {
                return Some(change);
            }
        }
    })
}

fn change(message: &[u8]) -> Option<Change<'_>> {
    let [verb, subsystem] = *message.get(4..6)? else { return None };
    if subsystem != SUBSYSTEM || verb == NEW_GENERATION {
        return None;
    }
    let author = number(message.get(12..16)?)?;
    let mut attributes = message.get(20..)?;
    loop {
        let header = attributes.get(..4)?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let kind = u16::from_ne_bytes([header[2], header[3]]) & 0x3fff;
        let value = attributes.get(4..length)?;
        if kind == TABLE {
            let table = std::str::from_utf8(value).ok()?.trim_end_matches('\0');
            return Some(Change { table, author });
        }
        attributes = attributes.get(length.next_multiple_of(4)..)?;
    }
}

fn number(bytes: &[u8]) -> Option<u32> {
    bytes.try_into().ok().map(u32::from_ne_bytes)
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
    fn torn_messages_are_no_changes() {
        let table = [&7u16.to_ne_bytes()[..], &1u16.to_ne_bytes(), b"ab\0\0"].concat();
        let bytes = message(2, 9, &table);
        for end in 0..bytes.len() - 4 {
            assert_eq!(changes(&bytes[..end]).count(), 0);
        }
        assert_eq!(changes(&[0; 40]).count(), 0);
    }
}
