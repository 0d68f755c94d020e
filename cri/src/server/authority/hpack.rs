//! A header block (RFC 7541, section 6), as far as needed to find the value of `:authority`.

const NAME: &[u8; 10] = b":authority";
/// Index of `:authority` in the static table (RFC 7541, appendix A).
const INDEX: usize = 1;
/// Largest integer that is followed: the length of any string in a frame is less.
const LARGEST: usize = 1 << 28;

/// Position in a header block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Block {
    state: State,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// A representation begins.
    #[default]
    Begin,
    /// An integer goes on: its value so far, the next bit's place, and its meaning.
    Integer { value: usize, shift: u32, of: Of },
    /// The first byte of a string's length. `is_authority` of a name says that it may be.
    Length { of: Text },
    /// A string.
    Text { left: usize, of: Text, at: usize, plain: bool },
    /// Something is wrong with the block, and the library will say so.
    Lost,
}

/// An integer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// An index into the tables, or the size of the dynamic one: nothing follows.
    Whole,
    /// The index of a name, whose value follows.
    Name,
    /// A string's length.
    Length { of: Text, plain: bool },
}

/// A string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    /// A name, whose bytes so far are those of `:authority` or not.
    Name {
        matches: bool,
    },
    Value {
        is_authority: bool,
    },
}

// === impl Block ===

impl Block {
    /// Takes the next bytes of the block, and changes those that are the value of `:authority`.
    pub(super) fn pass(&mut self, bytes: &mut [u8]) {
        let mut at = 0;
        while let Some(rest) = bytes.get_mut(at..).filter(|rest| !rest.is_empty()) {
            at += self.step(rest);
        }
    }

    /// Returns how many bytes it took: one at least.
    fn step(&mut self, bytes: &mut [u8]) -> usize {
        let byte = bytes[0];
        match self.state {
            State::Lost => return bytes.len(),
            State::Begin => self.state = begin(byte),
            State::Integer { value, shift, of } => self.state = go_on(byte, (value, shift), of),
            State::Length { of } => {
                self.state = integer(byte, 0x7f, Of::Length { of, plain: byte & 0x80 == 0 });
            }
            State::Text { left, of, at, plain } => {
                let taken = left.min(bytes.len());
                let of = text(&mut bytes[..taken], of, at, plain);
                self.state = text_state(left - taken, of, at + taken, plain);
                return taken;
            }
        }
        1
    }
}

fn begin(byte: u8) -> State {
    match byte {
        // Indexed.
        0x80.. => integer(byte, 0x7f, Of::Whole),
        // Literal with incremental indexing.
        0x40.. => integer(byte, 0x3f, Of::Name),
        // Dynamic table size update.
        0x20.. => integer(byte, 0x1f, Of::Whole),
        // Literal without indexing, and never indexed.
        _ => integer(byte, 0x0f, Of::Name),
    }
}

/// An integer whose prefix is in the byte (RFC 7541, section 5.1).
fn integer(byte: u8, prefix: u8, of: Of) -> State {
    let value = usize::from(byte & prefix);
    if value == usize::from(prefix) { State::Integer { value, shift: 0, of } } else { known(value, of) }
}

fn go_on(byte: u8, (value, shift): (usize, u32), of: Of) -> State {
    let value = value + (usize::from(byte & 0x7f) << shift);
    if value > LARGEST || shift > 28 {
        State::Lost
    } else if byte & 0x80 == 0 {
        known(value, of)
    } else {
        State::Integer { value, shift: shift + 7, of }
    }
}

fn known(value: usize, of: Of) -> State {
    match of {
        Of::Whole => State::Begin,
        Of::Name if value == 0 => State::Length { of: Text::Name { matches: true } },
        Of::Name => State::Length { of: Text::Value { is_authority: value == INDEX } },
        Of::Length { of: Text::Name { .. }, plain } => {
            text_state(value, Text::Name { matches: plain && value == NAME.len() }, 0, plain)
        }
        Of::Length { of, plain } => text_state(value, of, 0, plain),
    }
}

/// Looks at bytes of a string, and changes those that have to be.
fn text(bytes: &mut [u8], of: Text, at: usize, plain: bool) -> Text {
    match of {
        Text::Name { matches } => {
            Text::Name { matches: matches && NAME.get(at..).is_some_and(|name| name.starts_with(bytes)) }
        }
        Text::Value { is_authority } => {
            if is_authority && plain {
                bytes.iter_mut().filter(|byte| **byte == b'%').for_each(|byte| *byte = b'-');
            }
            of
        }
    }
}

/// Behind a name comes a value, behind a value the next representation.
fn text_state(left: usize, of: Text, at: usize, plain: bool) -> State {
    match of {
        _ if left > 0 => State::Text { left, of, at, plain },
        Text::Name { matches } => State::Length { of: Text::Value { is_authority: matches } },
        Text::Value { .. } => State::Begin,
    }
}
