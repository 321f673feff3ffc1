"""Small models of many families of transformers, with random weights and inputs.

A configuration class and a model class name a family. Sizes that all configurations share are small.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["FAMILIES", "float_outputs", "inputs_of", "small_config", "small_model"]

_TABLE = """
AfmoeConfig:AfmoeForCausalLM Aimv2VisionConfig:Aimv2VisionModel AlbertConfig:AlbertForMaskedLM ApertusConfig:ApertusForCausalLM
ArceeConfig:ArceeForCausalLM AriaTextConfig:AriaTextForCausalLM BartConfig:BartForCausalLM BeamConfig:BeamForCausalLM
BeitConfig:BeitForImageClassification BertConfig:BertLMHeadModel BertGenerationConfig:BertGenerationDecoder
BigBirdConfig:BigBirdForCausalLM BigBirdPegasusConfig:BigBirdPegasusForCausalLM BioGptConfig:BioGptForCausalLM
BitNetConfig:BitNetForCausalLM BlenderbotConfig:BlenderbotForCausalLM BlenderbotSmallConfig:BlenderbotSmallForCausalLM
BloomConfig:BloomForCausalLM CamembertConfig:CamembertForCausalLM CanineConfig:CanineModel
ChineseCLIPVisionConfig:ChineseCLIPVisionModel CLIPTextConfig:CLIPTextModel CLIPVisionConfig:CLIPVisionModel
Cohere2Config:Cohere2ForCausalLM Cohere2MoeConfig:Cohere2MoeForCausalLM CohereConfig:CohereForCausalLM
ConvBertConfig:ConvBertForMaskedLM CTRLConfig:CTRLLMHeadModel CwmConfig:CwmForCausalLM Data2VecTextConfig:Data2VecTextForCausalLM
Data2VecVisionConfig:Data2VecVisionForImageClassification DebertaConfig:DebertaForMaskedLM DebertaV2Config:DebertaV2ForMaskedLM
DeepseekV4Config:DeepseekV4ForCausalLM DeiTConfig:DeiTForImageClassification DiffLlamaConfig:DiffLlamaForCausalLM
Dinov2Config:Dinov2ForImageClassification Dinov2WithRegistersConfig:Dinov2WithRegistersForImageClassification
DINOv3ViTConfig:DINOv3ViTModel DistilBertConfig:DistilBertForMaskedLM DogeConfig:DogeForCausalLM DPRConfig:DPRQuestionEncoder
DPTConfig:DPTModel ElectraConfig:ElectraForCausalLM EmbeddingGemma2TextConfig:EmbeddingGemma2TextModel
Ernie4_5_MoeConfig:Ernie4_5_MoeForCausalLM Ernie4_5Config:Ernie4_5ForCausalLM ErnieConfig:ErnieForCausalLM EsmConfig:EsmForMaskedLM
EuroBertConfig:EuroBertForMaskedLM Exaone4Config:Exaone4ForCausalLM ExaoneMoeConfig:ExaoneMoeForCausalLM
FalconConfig:FalconForCausalLM FalconH1Config:FalconH1ForCausalLM FalconMambaConfig:FalconMambaForCausalLM
FlexOlmoConfig:FlexOlmoForCausalLM FlintConfig:FlintForCausalLM FNetConfig:FNetForMaskedLM Gemma2Config:Gemma2ForCausalLM
Gemma3TextConfig:Gemma3ForCausalLM Gemma4TextConfig:Gemma4ForCausalLM Gemma4UnifiedTextConfig:Gemma4UnifiedForCausalLM
GemmaConfig:GemmaForCausalLM Glm4Config:Glm4ForCausalLM Glm4MoeConfig:Glm4MoeForCausalLM GlmConfig:GlmForCausalLM
GPT2Config:GPT2LMHeadModel GPTBigCodeConfig:GPTBigCodeForCausalLM GPTNeoXConfig:GPTNeoXForCausalLM
GPTNeoXJapaneseConfig:GPTNeoXJapaneseForCausalLM GptOssConfig:GptOssForCausalLM GraniteConfig:GraniteForCausalLM
GraniteDoclingTextConfig:GraniteDoclingTextModel GraniteMoeConfig:GraniteMoeForCausalLM
GraniteMoeSharedConfig:GraniteMoeSharedForCausalLM GraniteMoeSWAConfig:GraniteMoeSWAForCausalLM
GraniteSWAConfig:GraniteSWAForCausalLM GteConfig:GteForMaskedLM HeliumConfig:HeliumForCausalLM
HiggsAudioV2Config:HiggsAudioV2ForConditionalGeneration HrmTextConfig:HrmTextForCausalLM
HunYuanDenseV1Config:HunYuanDenseV1ForCausalLM HunYuanMoEV1Config:HunYuanMoEV1ForCausalLM HyperCLOVAXConfig:HyperCLOVAXForCausalLM
HYV3Config:HYV3ForCausalLM IBertConfig:IBertForMaskedLM IJepaConfig:IJepaForImageClassification
ImageGPTConfig:ImageGPTForImageClassification Inkling2TextConfig:Inkling2ForCausalLM InklingTextConfig:InklingForCausalLM
InternLM3Config:LlamaForCausalLM InternVLVisionConfig:InternVLVisionModel IQuestCoderConfig:LlamaForCausalLM
Jais2Config:Jais2ForCausalLM JetMoeConfig:JetMoeForCausalLM JinaEmbeddingsV3Config:JinaEmbeddingsV3ForMaskedLM
Kolibri1Config:Kolibri1ForCausalLM LagunaConfig:LagunaForCausalLM LayoutLMConfig:LayoutLMForMaskedLM
LEDConfig:LEDForConditionalGeneration Lfm2Config:Lfm2ForCausalLM Llama4TextConfig:Llama4ForCausalLM LlamaConfig:LlamaForCausalLM
LongformerConfig:LongformerForMaskedLM LongT5Config:LongT5ForConditionalGeneration M2M100Config:M2M100ForConditionalGeneration
MambaConfig:MambaForCausalLM MarianConfig:MarianForCausalLM MarkupLMConfig:MarkupLMModel MBartConfig:MBartForCausalLM
MegatronBertConfig:MegatronBertForCausalLM MellumConfig:MellumForCausalLM MiMoV2FlashConfig:MiMoV2FlashForCausalLM
MiniMaxConfig:MiniMaxForCausalLM MiniMaxM2Config:MiniMaxM2ForCausalLM MiniMaxM3VLTextConfig:MiniMaxM3VLForCausalLM
Ministral3Config:Ministral3ForCausalLM MinistralConfig:MinistralForCausalLM MistralConfig:MistralForCausalLM
MixtralConfig:MixtralForCausalLM MLCDVisionConfig:MLCDVisionModel MobileNetV2Config:MobileNetV2ForImageClassification
ModernBertConfig:ModernBertForMaskedLM ModernBertDecoderConfig:ModernBertDecoderForCausalLM Molmo2TextConfig:Molmo2TextModel
MoonshineConfig:MoonshineForConditionalGeneration MoshiConfig:MoshiForCausalLM MPNetConfig:MPNetForMaskedLM MptConfig:MptForCausalLM
MraConfig:MraForMaskedLM MT5Config:MT5ForConditionalGeneration MuseGlimmerTextConfig:MuseGlimmerTextModel MvpConfig:MvpForCausalLM
NanoChatConfig:NanoChatForCausalLM NemotronConfig:NemotronForCausalLM NemotronHConfig:NemotronHForCausalLM
NeoMMEConfig:NeoMMEForMaskedLM NllbMoeConfig:NllbMoeForConditionalGeneration NomicBertConfig:NomicBertForMaskedLM
NystromformerConfig:NystromformerForMaskedLM Olmo2Config:Olmo2ForCausalLM Olmo3Config:Olmo3ForCausalLM OlmoConfig:OlmoForCausalLM
OlmoeConfig:OlmoeForCausalLM OlmoHybridConfig:OlmoHybridForCausalLM OpenAIGPTConfig:OpenAIGPTLMHeadModel
OpenAIPrivacyFilterConfig:OpenAIPrivacyFilterModel OPTConfig:OPTForCausalLM PegasusConfig:PegasusForCausalLM
PegasusXConfig:PegasusXForConditionalGeneration PersimmonConfig:PersimmonForCausalLM Phi3Config:Phi3ForCausalLM
PhiConfig:PhiForCausalLM PhimoeConfig:PhimoeForCausalLM PixioConfig:PixioModel PixtralVisionConfig:PixtralVisionModel
PLBartConfig:PLBartForCausalLM Pop2PianoConfig:Pop2PianoForConditionalGeneration PPLCNetConfig:PPLCNetForImageClassification
ProphetNetConfig:ProphetNetForCausalLM QianfanOCRVisionConfig:QianfanOCRVisionModel Qwen2Config:Qwen2ForCausalLM
Qwen2MoeConfig:Qwen2MoeForCausalLM Qwen3Config:Qwen3ForCausalLM Qwen3MoeConfig:Qwen3MoeForCausalLM
Qwen3VLMoeTextConfig:Qwen3VLMoeTextModel Qwen3VLTextConfig:Qwen3VLTextModel RemBertConfig:RemBertForCausalLM
RobertaConfig:RobertaForCausalLM RobertaPreLayerNormConfig:RobertaPreLayerNormForCausalLM RoFormerConfig:RoFormerForCausalLM
RwkvConfig:RwkvForCausalLM Sam3ViTConfig:Sam3ViTModel SamHQVisionConfig:SamHQVisionModel SamVisionConfig:SamVisionModel
Sapiens2Config:Sapiens2Model SeamlessM4TConfig:SeamlessM4TForTextToText SeamlessM4Tv2Config:SeamlessM4Tv2ForTextToText
SeedOssConfig:SeedOssForCausalLM SiglipVisionConfig:SiglipVisionModel SmolLM3Config:SmolLM3ForCausalLM
SolarOpenConfig:SolarOpenForCausalLM Speech2TextConfig:Speech2TextForConditionalGeneration SplinterConfig:SplinterModel
SqueezeBertConfig:SqueezeBertForMaskedLM StableLmConfig:StableLmForCausalLM Starcoder2Config:Starcoder2ForCausalLM
SwitchTransformersConfig:SwitchTransformersForConditionalGeneration T5Config:T5ForConditionalGeneration TapasConfig:TapasForMaskedLM
Tipsv2TextConfig:Tipsv2TextModel Tipsv2VisionConfig:Tipsv2VisionModel TrOCRConfig:TrOCRForCausalLM
UltrabertConfig:UltrabertForMaskedLM UMT5Config:UMT5ForConditionalGeneration VaultGemmaConfig:VaultGemmaForCausalLM
VisualBertConfig:VisualBertModel ViTConfig:ViTForImageClassification VitDetConfig:VitDetModel ViTMAEConfig:ViTMAEModel
ViTMSNConfig:ViTMSNForImageClassification WhisperConfig:WhisperForCausalLM XGLMConfig:XGLMForCausalLM
XLMRobertaConfig:XLMRobertaForCausalLM XLMRobertaXLConfig:XLMRobertaXLForCausalLM XLNetConfig:XLNetLMHeadModel
YosoConfig:YosoForMaskedLM
"""
FAMILIES: dict[str, str] = dict(pair.split(":") for pair in _TABLE.split())  # type: ignore[misc]
"""Model classes by configuration class."""

_SIZES: dict[str, int] = (
    dict.fromkeys(["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "projection_dim", "word_embed_proj_dim"], 64)
    | dict.fromkeys(["intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "hidden_dim"], 128)
    | dict.fromkeys(["num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"], 2)
    | dict.fromkeys(["num_decoder_layers", "num_encoder_layers", "encoder_num_layers", "num_key_value_heads", "num_experts_per_tok"], 2)
    | dict.fromkeys(["num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads"], 4)
    | dict.fromkeys(["num_local_experts", "num_experts", "n_routed_experts", "attention_window"], 4)
    | dict.fromkeys(["head_dim", "d_kv", "attention_head_dim"], 16)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size", "max_position_embeddings", "n_positions"], 64)
    | {"vocab_size": 128, "vocab_size_per_layer_input": 128, "image_size": 32, "patch_size": 8, "sliding_window": 8}
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}
)


def small_config(family: str) -> Any:
    """Return a new configuration of a family, with those small sizes that its class has."""
    kind = getattr(transformers, family)
    known = {*kind().to_dict(), *inspect.signature(kind).parameters}
    return kind(**{name: size for name, size in _SIZES.items() if name in known})


@torch.no_grad()
def small_model(family: str) -> nn.Module:
    """Return a model of a family with random weights, in evaluation mode."""
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, FAMILIES[family])(small_config(family)).eval()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            is_norm = parameter.ndim == 1 and float(parameter.mean()) > 0.5
            parameter.copy_(torch.randn_like(parameter) * 0.1 + is_norm)
    return model


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Return the arguments of a forward for a model that `small_model` returns."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 100, (1, 16), generator=generator)
    config, name = model.config, model.main_input_name
    inputs: dict[str, Tensor] = {}
    if name == "input_ids":
        inputs[name] = ids
    elif name == "pixel_values":
        size = getattr(config, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        inputs[name] = torch.randn(1, getattr(config, "num_channels", 3), size, size, generator=generator)
    elif name == "input_values":
        inputs[name] = torch.randn(1, 4000, generator=generator)
    else:
        inputs[name] = torch.randn(1, 100, config.input_feat_per_channel, generator=generator)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        inputs["decoder_input_ids"] = ids
    return inputs


@torch.no_grad()
def float_outputs(model: nn.Module) -> list[Tensor]:
    """Return the floating-point tensors in a forward's result, in order."""
    torch.manual_seed(0)
    return [tensor for tensor in _tensors(model(**inputs_of(model))) if tensor.is_floating_point()]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
