//! The protobuf wire format: tags, varints, lengths.

/// The bytes are malformed.
#[derive(Debug)]
pub(crate) struct WireError(pub(crate) &'static str);

/// One value in wire format.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WireValue<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

/// Iterates over the fields of one message.
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
}

// === impl Reader ===

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Number and value of the next field.
    pub(crate) fn next(&mut self) -> Result<Option<(u32, WireValue<'a>)>, WireError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).map_err(|_error| WireError("field number out of range"))?;
        let value = match tag & 7 {
            0 => WireValue::Varint(self.varint()?),
            1 => WireValue::Fixed64(u64::from_le_bytes(self.array()?)),
            2 => {
                let length =
                    usize::try_from(self.varint()?).map_err(|_error| WireError("length out of range"))?;
                WireValue::Bytes(self.take(length)?)
            }
            5 => WireValue::Fixed32(u32::from_le_bytes(self.array()?)),
            _ => return Err(WireError("unknown wire type")),
        };
        Ok(Some((number, value)))
    }

    /// A varint of at most ten bytes.
    pub(crate) fn varint(&mut self) -> Result<u64, WireError> {
        let mut number = 0;
        for shift in (0..70).step_by(7) {
            let [byte] = self.array()?;
            number |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(WireError("number too long"))
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(WireError("unexpected end"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(WireError("unexpected end"))?;
        self.rest = rest;
        Ok(*taken)
    }
}

// === impl WireValue ===

impl WireValue<'_> {
    /// The value as a signed integer (two's complement, as proto's int32 and int64 are).
    pub(crate) fn int(self) -> Result<i64, WireError> {
        match self {
            WireValue::Varint(number) => Ok(number.cast_signed()),
            WireValue::Fixed64(number) => Ok(number.cast_signed()),
            WireValue::Fixed32(number) => Ok(i64::from(number)),
            WireValue::Bytes(_) => Err(WireError("a number was expected")),
        }
    }

    /// The value as a floating-point number.
    pub(crate) fn double(self) -> Result<f64, WireError> {
        match self {
            WireValue::Fixed64(bits) => Ok(f64::from_bits(bits)),
            _ => Err(WireError("a double was expected")),
        }
    }
}
