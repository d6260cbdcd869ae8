//! Inputs and outputs of modules, as hooks see them.

use std::ops::{Index, IndexMut};

use smallvec::SmallVec;

use crate::declare::tuples;
use crate::{Error, Result, Scalar, Tensor};

/// One input or output of a module.
///
/// ```
/// use dtensor::nn::Argument;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let x = Tensor::ones([2], DType::F32)?;
/// assert!(Argument::from(&x).as_tensor().is_some());
/// assert!(matches!(Argument::from(None::<&Tensor>), Argument::Nothing));
/// assert!(matches!(Argument::from(true), Argument::Flag(true)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Argument {
    /// A tensor.
    Tensor(Tensor),
    /// A list of tensors.
    Tensors(Vec<Tensor>),
    /// A number.
    Number(Scalar),
    /// A boolean.
    Flag(bool),
    /// A missing option.
    Nothing,
    /// A value of a type that hooks cannot see. It is passed through unchanged.
    Other,
}

impl Argument {
    /// Returns the tensor, if it is one.
    pub fn as_tensor(&self) -> Option<&Tensor> {
        match self {
            Argument::Tensor(tensor) => Some(tensor),
            _ => None,
        }
    }

    fn as_optional(&self) -> Option<Option<&Tensor>> {
        match self {
            Argument::Tensor(tensor) => Some(Some(tensor)),
            Argument::Nothing => Some(None),
            _ => None,
        }
    }

    fn as_list(&self) -> Option<&Vec<Tensor>> {
        match self {
            Argument::Tensors(tensors) => Some(tensors),
            _ => None,
        }
    }

    fn as_tensors(&self) -> Option<&[Tensor]> {
        self.as_list().map(Vec::as_slice)
    }

    fn as_flag(&self) -> Option<bool> {
        match self {
            Argument::Flag(flag) => Some(*flag),
            _ => None,
        }
    }

    fn as_integer(&self) -> Option<i64> {
        match self {
            Argument::Number(Scalar::Int(number)) => Some(*number),
            _ => None,
        }
    }

    fn as_number(&self) -> Option<f64> {
        match self {
            Argument::Number(Scalar::Int(number)) => Some(*number as f64),
            Argument::Number(Scalar::Float(number)) => Some(*number),
            _ => None,
        }
    }
}

/// The inputs of a module's `forward`, in order and with the names of its arguments.
///
/// ```
/// use dtensor::inputs;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let (x, y) = (Tensor::ones([2], DType::F32)?, Tensor::zeros([3], DType::F32)?);
/// let mut inputs = inputs![x = &x, y = &y, causal = true];
/// assert_eq!(inputs.names().collect::<Vec<_>>(), ["x", "y", "causal"]);
/// assert_eq!(inputs.tensor("y")?.dims(), [3]);
/// inputs["x"] = x.add(1.0)?.into();
/// assert_eq!(inputs.tensor(0)?.to_vec::<f32>()?, [2., 2.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Inputs {
    arguments: SmallVec<[(&'static str, Argument); 4]>,
}

/// The index or the name of an input.
///
/// ```
/// use dtensor::inputs;
/// # fn main() -> dtensor::Result<()> {
/// let inputs = inputs![causal = true];
/// assert!(inputs.get(0).is_some() && inputs.get("causal").is_some());
/// assert!(inputs.get(1).is_none() && inputs.get("x").is_none());
/// # Ok(())
/// # }
/// ```
pub trait Which: Copy + std::fmt::Display {
    #[doc(hidden)]
    fn find(self, inputs: &Inputs) -> Option<usize>;
}

impl Which for usize {
    fn find(self, inputs: &Inputs) -> Option<usize> {
        (self < inputs.len()).then_some(self)
    }
}

impl Which for &str {
    fn find(self, inputs: &Inputs) -> Option<usize> {
        inputs.arguments.iter().position(|(name, _)| *name == self)
    }
}

impl Inputs {
    /// Creates an empty list of inputs.
    pub fn new() -> Self {
        Inputs::default()
    }

    /// Appends an input.
    pub fn push(&mut self, name: &'static str, argument: impl Into<Argument>) {
        self.arguments.push((name, argument.into()));
    }

    /// Returns the number of inputs.
    pub fn len(&self) -> usize {
        self.arguments.len()
    }

    /// Returns true if there are no inputs.
    pub fn is_empty(&self) -> bool {
        self.arguments.is_empty()
    }

    /// Iterates over the names, in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.arguments.iter().map(|(name, _)| *name)
    }

    /// Iterates over names and inputs, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Argument)> {
        self.arguments.iter().map(|(name, argument)| (*name, argument))
    }

    /// Returns an input, if it exists.
    pub fn get(&self, which: impl Which) -> Option<&Argument> {
        which.find(self).map(|i| &self.arguments[i].1)
    }

    /// Returns an input that must exist and be a tensor.
    pub fn tensor(&self, which: impl Which) -> Result<&Tensor> {
        self.get(which).and_then(Argument::as_tensor).ok_or_else(|| {
            let names = self.names().collect::<Vec<_>>().join(", ");
            Error::argument(
                "inputs",
                format!("expecting input {which} to be a tensor; the inputs are ({names})"),
            )
        })
    }
}

impl<W: Which> Index<W> for Inputs {
    type Output = Argument;

    fn index(&self, which: W) -> &Argument {
        self.get(which).unwrap_or_else(|| panic!("there is no input {which} among {} inputs", self.len()))
    }
}

impl<W: Which> IndexMut<W> for Inputs {
    fn index_mut(&mut self, which: W) -> &mut Argument {
        match which.find(self) {
            Some(i) => &mut self.arguments[i].1,
            None => panic!("there is no input {which} among {} inputs", self.len()),
        }
    }
}

/// Builds [`Inputs`](crate::nn::Inputs) from arguments and their names.
///
/// ```
/// use dtensor::inputs;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let (x, other) = (Tensor::ones([2], DType::F32)?, Tensor::ones([3], DType::F32)?);
/// let inputs = inputs![x, y = &other];
/// assert_eq!((inputs.tensor("x")?.dims(), inputs.tensor("y")?.dims()), (&[2][..], &[3][..]));
/// # Ok(())
/// # }
/// ```
#[macro_export]
macro_rules! inputs {
    ($($name:ident $(= $value:expr)?),* $(,)?) => {{
        #[allow(unused_mut)]
        let mut inputs = $crate::nn::Inputs::new();
        $($crate::inputs!(@one inputs $name $($value)?);)*
        inputs
    }};
    (@one $inputs:ident $name:ident $value:expr) => {
        $inputs.push(stringify!($name), $value)
    };
    (@one $inputs:ident $name:ident) => {
        $inputs.push(stringify!($name), $name)
    };
}

/// The outputs of a module's `forward`, in order: one tensor, or the elements of a tuple or list.
///
/// ```
/// use dtensor::nn::Outputs;
/// use dtensor::prelude::*;
/// # fn main() -> Result<()> {
/// let mut outputs = Outputs::from(Tensor::ones([2], DType::F32)?);
/// outputs[0] = outputs.tensor(0)?.neg()?.into();
/// assert_eq!(outputs.len(), 1);
/// assert_eq!(outputs.tensor(0)?.to_vec::<f32>()?, [-1., -1.]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Outputs {
    arguments: SmallVec<[Argument; 1]>,
}

impl Outputs {
    /// Returns the number of outputs.
    pub fn len(&self) -> usize {
        self.arguments.len()
    }

    /// Returns true if there are no outputs.
    pub fn is_empty(&self) -> bool {
        self.arguments.is_empty()
    }

    /// Iterates over the outputs, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Argument> {
        self.arguments.iter()
    }

    /// Returns an output that must exist and be a tensor.
    pub fn tensor(&self, i: usize) -> Result<&Tensor> {
        self.arguments.get(i).and_then(Argument::as_tensor).ok_or_else(|| {
            let message = format!("expecting output {i} to be a tensor; there are {} outputs", self.len());
            Error::argument("outputs", message)
        })
    }
}

impl Index<usize> for Outputs {
    type Output = Argument;

    fn index(&self, i: usize) -> &Argument {
        &self.arguments[i]
    }
}

impl IndexMut<usize> for Outputs {
    fn index_mut(&mut self, i: usize) -> &mut Argument {
        &mut self.arguments[i]
    }
}

impl<R: Returned> From<R> for Outputs {
    fn from(result: R) -> Self {
        result.give()
    }
}

impl FromIterator<Argument> for Outputs {
    fn from_iter<I: IntoIterator<Item = Argument>>(arguments: I) -> Self {
        Outputs { arguments: arguments.into_iter().collect() }
    }
}

/// A type of `forward` arguments that hooks can see. Arguments of other types bypass the hooks.
///
/// ```
/// use dtensor::nn::{Argument, Passed};
///
/// /// The first position.
/// #[derive(Clone, Copy, Debug, PartialEq)]
/// struct Start(i64);
///
/// impl Passed<'_> for Start {
///     fn give(&self) -> Argument {
///         self.0.into()
///     }
///
///     fn take(argument: &Argument) -> Option<Self> {
///         i64::take(argument).map(Start)
///     }
/// }
///
/// assert_eq!(Start::take(&Start(3).give()), Some(Start(3)));
/// assert_eq!(Start::take(&true.into()), None);
/// ```
pub trait Passed<'a>: Sized {
    /// Converts the argument to the form that hooks see.
    fn give(&self) -> Argument;
    /// Converts back the argument that the hooks return. `None` if it has the wrong type.
    fn take(argument: &'a Argument) -> Option<Self>;
}

impl From<Tensor> for Argument {
    fn from(tensor: Tensor) -> Self {
        Argument::Tensor(tensor)
    }
}

macro_rules! arguments {
    ($($from:ty: $argument:ident => $give:expr, $seen:ident => $take:expr;)*) => {$(
        impl<'a> From<$from> for Argument {
            fn from($argument: $from) -> Self {
                $give
            }
        }

        impl<'a> Passed<'a> for $from {
            fn give(&self) -> Argument {
                Argument::from(self.clone())
            }

            fn take($seen: &'a Argument) -> Option<Self> {
                $take
            }
        }
    )*};
}

impl<'a> Passed<'a> for Tensor {
    fn give(&self) -> Argument {
        Argument::Tensor(self.clone())
    }

    fn take(argument: &'a Argument) -> Option<Self> {
        argument.as_tensor().cloned()
    }
}

fn from_optional(tensor: Option<&Tensor>) -> Argument {
    tensor.map_or(Argument::Nothing, |tensor| Argument::Tensor(tensor.clone()))
}

arguments! {
    &'a Tensor: x => Argument::Tensor(x.clone()), seen => seen.as_tensor();
    Option<&'a Tensor>: x => from_optional(x), seen => seen.as_optional();
    Option<Tensor>: x => from_optional(x.as_ref()), seen => seen.as_optional().map(|x| x.cloned());
    &'a [Tensor]: x => Argument::Tensors(x.to_vec()), seen => seen.as_tensors();
    Vec<Tensor>: x => Argument::Tensors(x), seen => seen.as_tensors().map(<[Tensor]>::to_vec);
    bool: x => Argument::Flag(x), seen => seen.as_flag();
    f64: x => Argument::Number(x.into()), seen => seen.as_number();
    f32: x => Argument::Number(f64::from(x).into()), seen => seen.as_number().map(|x| x as f32);
    &'a Vec<Tensor>: x => Argument::Tensors(x.clone()), seen => seen.as_list();
}

/// Integers. One that does not fit into an `i64` becomes `Argument::Other` and bypasses the hooks.
macro_rules! integers {
    ($($number:ty),*) => {
        arguments! {$(
            $number: x => i64::try_from(x).map_or(Argument::Other, |x| Argument::Number(x.into())),
                seen => seen.as_integer()?.try_into().ok();
        )*}
    };
}

integers!(i8, i16, i32, i64, isize, u8, u16, u32, u64, usize);

macro_rules! options {
    ($($of:ty),*) => {
        arguments! {$(
            Option<$of>: x => x.map_or(Argument::Nothing, Argument::from), seen => match seen {
                Argument::Nothing => Some(None),
                _ => <$of>::take(seen).map(Some),
            };
        )*}
    };
}

options!(bool, f32, f64, i32, i64, u32, u64, usize);

/// A return type of `forward` whose contents hooks can see.
///
/// ```
/// use dtensor::nn::{Outputs, Returned};
/// use dtensor::prelude::*;
///
/// struct Split {
///     head: Tensor,
///     tail: Tensor,
/// }
///
/// impl Returned for Split {
///     fn give(self) -> Outputs {
///         (self.head, self.tail).give()
///     }
///
///     fn take(outputs: Outputs) -> Option<Self> {
///         <(Tensor, Tensor)>::take(outputs).map(|(head, tail)| Split { head, tail })
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let split = Split { head: Tensor::ones([1], DType::F32)?, tail: Tensor::ones([3], DType::F32)? };
/// let outputs = split.give();
/// assert_eq!(outputs.tensor(1)?.dims(), [3]);
/// assert!(Split::take(outputs).is_some_and(|split| split.head.numel() + split.tail.numel() == 4));
/// # Ok(())
/// # }
/// ```
pub trait Returned: Sized {
    /// Converts the result to the form that hooks see.
    fn give(self) -> Outputs;
    /// Converts back the outputs that the hooks return. `None` if they have the wrong types.
    fn take(outputs: Outputs) -> Option<Self>;
}

impl Returned for Tensor {
    fn give(self) -> Outputs {
        Outputs::from_iter([self.into()])
    }

    fn take(mut outputs: Outputs) -> Option<Self> {
        match (outputs.arguments.pop(), outputs.is_empty()) {
            (Some(Argument::Tensor(tensor)), true) => Some(tensor),
            _ => None,
        }
    }
}

impl Returned for Option<Tensor> {
    fn give(self) -> Outputs {
        Outputs::from_iter([self.into()])
    }

    fn take(outputs: Outputs) -> Option<Self> {
        match &outputs.arguments[..] {
            [one] => Passed::take(one),
            _ => None,
        }
    }
}

impl Returned for Vec<Tensor> {
    fn give(self) -> Outputs {
        self.into_iter().map(Argument::Tensor).collect()
    }

    fn take(outputs: Outputs) -> Option<Self> {
        outputs.iter().map(|argument| argument.as_tensor().cloned()).collect()
    }
}

macro_rules! returned {
    ($(($($part:ident $i:tt),*);)*) => {$(
        impl<$($part: for<'a> Passed<'a>),*> Returned for ($($part,)*) {
            fn give(self) -> Outputs {
                Outputs::from_iter([$(self.$i.give()),*])
            }

            fn take(outputs: Outputs) -> Option<Self> {
                (outputs.len() == [$($i),*].len()).then_some(())?;
                Some(($($part::take(&outputs[$i])?,)*))
            }
        }
    )*};
}

tuples!(returned);
