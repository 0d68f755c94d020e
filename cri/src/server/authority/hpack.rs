//! Parser for HPACK header blocks (RFC 7541, section 6), as far as needed to find the value of `:authority`.

const NAME: &[u8; 10] = b":authority";
/// Index of `:authority` in the static table (RFC 7541, appendix A).
const INDEX: usize = 1;
/// Largest integer that is parsed. Every string in a frame is shorter.
const MAX_INTEGER: usize = 1 << 28;

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
    /// An integer continues: its value so far, the position of the next bit, and its meaning.
    Integer { value: usize, shift: u32, of: IntegerKind },
    /// The first byte of a string's length.
    Length { of: Text },
    /// A string.
    Text { left: usize, of: Text, at: usize, coding: Coding },
    /// The block is invalid. The HTTP library will report it.
    Lost,
}

/// The meaning of an integer that is being parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IntegerKind {
    /// An index into the tables, or the size of the dynamic table. No value follows.
    Whole,
    /// The index of a name. The value follows.
    Name,
    /// A string's length.
    Length { of: Text, plain: bool },
}

/// A string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Text {
    /// A name. `matches` is true as long as its bytes are a prefix of `:authority`.
    Name {
        matches: bool,
    },
    Value {
        is_authority: bool,
    },
}

/// Coding of a string.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Plain,
    /// Bits of a Huffman code that is not complete.
    Huffman {
        code: u8,
        bits: u8,
    },
    /// The next bits are padding, or a Huffman code of more than eight bits. The rest of the string is not changed.
    Unknown,
}

// === impl Block ===

impl Block {
    /// Processes the next bytes of the block. Changes the value of `:authority` in place.
    pub(super) fn process(&mut self, bytes: &mut [u8]) {
        let mut at = 0;
        while let Some(rest) = bytes.get_mut(at..).filter(|rest| !rest.is_empty()) {
            at += self.step(rest);
        }
    }

    /// Processes one element. Returns the number of processed bytes, at least one.
    fn step(&mut self, bytes: &mut [u8]) -> usize {
        let byte = bytes[0];
        match self.state {
            State::Lost => return bytes.len(),
            State::Begin => self.state = begin(byte),
            State::Integer { value, shift, of } => self.state = add_integer_byte(byte, value, shift, of),
            State::Length { of } => {
                self.state = integer(byte, 0x7f, IntegerKind::Length { of, plain: byte & 0x80 == 0 });
            }
            State::Text { left, of, at, coding } => {
                let taken = left.min(bytes.len());
                let (of, coding) = text(&mut bytes[..taken], of, at, coding);
                self.state = text_state(left - taken, of, at + taken, coding);
                return taken;
            }
        }
        1
    }
}

fn begin(byte: u8) -> State {
    match byte {
        // Indexed.
        0x80.. => integer(byte, 0x7f, IntegerKind::Whole),
        // Literal with incremental indexing.
        0x40.. => integer(byte, 0x3f, IntegerKind::Name),
        // Dynamic table size update.
        0x20.. => integer(byte, 0x1f, IntegerKind::Whole),
        // Literal without indexing, and never indexed.
        _ => integer(byte, 0x0f, IntegerKind::Name),
    }
}

/// Parses an integer whose prefix is in the byte (RFC 7541, section 5.1).
fn integer(byte: u8, prefix: u8, of: IntegerKind) -> State {
    let value = usize::from(byte & prefix);
    if value == usize::from(prefix) { State::Integer { value, shift: 0, of } } else { known(value, of) }
}

fn add_integer_byte(byte: u8, value: usize, shift: u32, of: IntegerKind) -> State {
    let part = usize::from(byte & 0x7f);
    // The limit is checked before the addition, because the sum must fit in a `usize` of 32 bits.
    if shift > 28 || part > MAX_INTEGER >> shift {
        return State::Lost;
    }
    let value = value + (part << shift);
    if value > MAX_INTEGER {
        State::Lost
    } else if byte & 0x80 == 0 {
        known(value, of)
    } else {
        State::Integer { value, shift: shift + 7, of }
    }
}

fn known(value: usize, of: IntegerKind) -> State {
    match of {
        IntegerKind::Whole => State::Begin,
        IntegerKind::Name if value == 0 => State::Length { of: Text::Name { matches: true } },
        IntegerKind::Name => State::Length { of: Text::Value { is_authority: value == INDEX } },
        IntegerKind::Length { of: Text::Name { .. }, plain } => {
            text_state(value, Text::Name { matches: plain && value == NAME.len() }, 0, Coding::of(plain))
        }
        IntegerKind::Length { of, plain } => text_state(value, of, 0, Coding::of(plain)),
    }
}

// === impl Coding ===

impl Coding {
    fn of(plain: bool) -> Self {
        if plain { Self::Plain } else { Self::Huffman { code: 0, bits: 0 } }
    }

    /// Processes a byte of an authority. Replaces percent signs and slashes bit by bit, because the rest of a code may
    /// not have been received yet. No code changes its length (RFC 7541, appendix B).
    fn process(&mut self, byte: &mut u8) {
        match self {
            Self::Plain if matches!(*byte, b'%' | b'/') => *byte = b'-',
            Self::Plain | Self::Unknown => {}
            Self::Huffman { .. } => {
                for place in (0..8).rev() {
                    *byte |= self.process_bit((*byte >> place) & 1) << place;
                }
            }
        }
    }

    /// Processes a bit of a Huffman code. Returns 1 if the bit must be set.
    fn process_bit(&mut self, bit: u8) -> u8 {
        let Self::Huffman { code, bits } = self else { return 0 };
        let mut set = 0;
        (*code, *bits) = (*code << 1 | bit, *bits + 1);
        match (*bits, *code) {
            // The first bits of a space and of a percent sign. With the last bit set, they are the first bits of a
            // hyphen and of a full stop.
            (5, 0b01010) => set = 1,
            // A slash becomes the digit 3.
            (6, 0b011000) => set = 1,
            _ => {}
        }
        *code |= set;
        let is_complete = match *bits {
            5 => *code <= 0b01001,
            6 => *code <= 0b101101,
            7 => *code <= 0b1111011,
            8 => *code <= 0b11111101,
            _ => false,
        };
        if is_complete {
            (*code, *bits) = (0, 0);
        } else if *bits == 8 {
            *self = Self::Unknown;
        }
        set
    }
}

/// Processes bytes of a string. Changes the bytes of an authority.
fn text(bytes: &mut [u8], of: Text, at: usize, mut coding: Coding) -> (Text, Coding) {
    match of {
        Text::Name { matches } => {
            let matches = matches && NAME.get(at..).is_some_and(|name| name.starts_with(bytes));
            (Text::Name { matches }, coding)
        }
        Text::Value { is_authority } => {
            if is_authority {
                bytes.iter_mut().for_each(|byte| coding.process(byte));
            }
            (of, coding)
        }
    }
}

/// The state after a string's bytes: a value follows a name, a representation follows a value.
fn text_state(left: usize, of: Text, at: usize, coding: Coding) -> State {
    match of {
        _ if left > 0 => State::Text { left, of, at, coding },
        Text::Name { matches } => State::Length { of: Text::Value { is_authority: matches } },
        Text::Value { .. } => State::Begin,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_beyond_the_limit_are_invalid_before_they_are_added() {
        let lost =
            |byte, value, shift| add_integer_byte(byte, value, shift, IntegerKind::Whole) == State::Lost;
        assert!(lost(0xff, 0, 28) && lost(0x7f, MAX_INTEGER, 28), "more than 32 bits");
        assert!(lost(0x81, MAX_INTEGER, 0) && lost(0x80, 0, 35));
        // A further byte of zero bits adds nothing.
        assert!(!lost(0x80, 127, 28) && !lost(0x00, 127, 28) && !lost(0xff, 0, 21));
        // The sum is never calculated, even where it would not fit.
        assert!(lost(0x7f, usize::MAX, 28));
    }
}
